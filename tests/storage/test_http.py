from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectChangedError, SourceInfo, StorageError, Written
from airflow_vllm_batch.storage.http import HttpSource, HttpTarget, Retries, signed_url_expiry
from airflow_vllm_batch.storage.settings import HttpSettings, StoreFile
from tests.support.certificates import make_authority

DATA = bytes(range(256)) * 2000
SIGNED_PATH = "/b/a%20b%2Fc+d?X-Amz-Signature=ab%2Bc%3D0123456789&x=%zz"
AT_ONCE = Retries(tries=3, pause_seconds=0.0)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A real server on loopback whose answers are given one after the other, the last one again and again."""

    def __init__(self, *answers: Handler, tls: ssl.SSLContext | None = None) -> None:
        self._answers = list(answers)
        self._tls = tls
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    async def __aenter__(self) -> Server:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    def url(self, path: str) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}{path}"

    def source(self, path: str = "/in.jsonl", **settings: object) -> HttpSource:
        found = HttpSettings.model_validate(settings)
        return HttpSource(self.url(path.partition("?")[0]), lambda: self.url(path), lambda: found, AT_ONCE)

    def target(self, path: str = "/out.jsonl", **settings: object) -> HttpTarget:
        found = HttpSettings.model_validate(settings)
        return HttpTarget(self.url(path.partition("?")[0]), lambda: self.url(path), lambda: found, AT_ONCE)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append((request.method, request.raw_path))
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.read())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return await answer(request)  # type: ignore[arg-type]


def reply(status: int = 200, body: bytes = DATA, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def broken(after: int, **headers: str) -> Handler:
    """Promise all of DATA and hang up after some of it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(DATA)), **headers})
        await response.prepare(request)
        await response.write(DATA[:after])
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


def ranged(etag: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        headers = {"ETag": etag, "Content-Range": f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"}
        return web.Response(status=206, body=DATA[start:], headers=headers)

    return answer


async def read(source: HttpSource, etag: str | None = None) -> bytes:
    return b"".join([chunk async for chunk in source.stream(etag=etag)])


async def test_the_bytes_of_a_signed_url_arrive_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    async with Server(reply()) as server:
        assert await read(server.source(SIGNED_PATH)) == DATA
        await server.target(SIGNED_PATH).put_file(tmp_path / "file")
        assert server.requests == [("GET", SIGNED_PATH), ("PUT", SIGNED_PATH)]


async def test_bytes_come_as_stored(tmp_path: Path) -> None:
    async with Server(reply(Content_Encoding="gzip", ETag='"e"')) as server:
        source = server.source()
        assert await read(source, '"e"') == DATA
        assert server.headers[0]["Accept-Encoding"] == "identity"
        assert await source.info() == SourceInfo(512_000, '"e"')


async def test_a_redirect_is_followed_without_the_secrets_of_the_first_host() -> None:
    async with Server(reply()) as other, Server(reply(302, b"", Location=other.url("/x%2Fy?s=%zz"))) as server:
        assert await read(server.source(headers={"X-Key": "h3ader"}, token="t0ken")) == DATA
        assert other.requests == [("GET", "/x%2Fy?s=%zz")]
        assert (server.headers[0]["X-Key"], server.headers[0]["Authorization"]) == ("h3ader", "Bearer t0ken")
        assert not {"X-Key", "Authorization"} & set(other.headers[0])


async def test_a_redirect_on_the_same_host_keeps_them() -> None:
    async with Server(reply(307, b"", Location="/moved"), reply()) as server:
        assert await read(server.source(login="me", password="passw0rd")) == DATA
        assert server.requests[1] == ("GET", "/moved")
        assert [each["Authorization"] for each in server.headers] == ["Basic bWU6cGFzc3cwcmQ="] * 2


async def test_redirects_without_end_are_an_error() -> None:
    async with Server(reply(302, b"", Location="/again")) as server:
        with pytest.raises(StorageError, match="more than 5 redirects"):
            await read(server.source())


async def test_a_broken_download_goes_on_where_it_broke() -> None:
    async with Server(broken(300_000, ETag='"e"'), ranged('"e"')) as server:
        assert await read(server.source()) == DATA
        assert server.headers[1]["If-Range"] == '"e"'
        begun = int(server.headers[1]["Range"].removeprefix("bytes=").removesuffix("-"))
        assert 0 < begun <= 300_000


async def test_a_server_without_ranges_is_read_again_from_the_front() -> None:
    async with Server(broken(300_000, ETag='"e"'), reply(ETag='"e"')) as server:
        assert await read(server.source()) == DATA


async def test_an_object_replaced_in_mid_download_is_found() -> None:
    async with Server(broken(300_000, ETag='"e"'), reply(ETag='"f"')) as server:
        with pytest.raises(ObjectChangedError, match="replaced"):
            await read(server.source())


async def test_a_pinned_object_that_was_replaced_is_found() -> None:
    async with Server(reply(ETag='"f"')) as server:
        with pytest.raises(ObjectChangedError, match="replaced"):
            await read(server.source(), '"e"')


async def test_a_truncated_body_without_an_etag_is_an_error() -> None:
    async with Server(broken(300_000)) as server:
        with pytest.raises(StorageError, match=r"truncated after [1-9][0-9]* bytes"):
            await read(server.source())
        assert len(server.requests) == 1


async def test_a_download_that_breaks_without_progress_ends() -> None:
    async with Server(broken(0, ETag='"e"')) as server:
        with pytest.raises(StorageError, match="broke off"):
            await read(server.source())
        assert len(server.requests) == 3


async def test_a_line_of_any_length_is_read() -> None:
    long = b'{"body":"' + b"x" * 9_000_000 + b'"}\n'
    async with Server(reply(body=long)) as server:
        chunks = [chunk async for chunk in server.source().stream()]
        assert b"".join(chunks) == long
        assert max(map(len, chunks)) <= 1024 * 1024


@pytest.mark.parametrize("status", [404, 410])
async def test_an_absent_object_is_file_not_found(status: int) -> None:
    async with Server(reply(status, b"no such key")) as server:
        with pytest.raises(FileNotFoundError, match=r"no such key.*'\+' is a plus"):
            await read(server.source("/a+b"))


async def test_a_put_is_repeated_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    async with Server(reply(503, b"busy"), reply(200, b"", ETag='"new"')) as server:
        assert await server.target().put_file(tmp_path / "file") == Written('"new"', 200)
        assert server.bodies == [DATA, DATA]
        for headers in server.headers:
            assert headers["Content-Length"] == "512000"
            assert "Transfer-Encoding" not in headers
            assert headers["Content-Type"] == "application/jsonl"


async def test_a_put_returns_after_its_first_success(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    async with Server(reply(201, b"")) as server:
        assert await server.target().put_file(tmp_path / "empty") == Written(None, 201)
        assert len(server.requests) == 1
        assert server.headers[0]["Content-Length"] == "0"


async def test_a_put_has_a_bound_of_tries_and_says_what_the_server_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    async with Server(reply(503, b"very " * 100 + b"busy")) as server:
        with pytest.raises(StorageError, match=r"status 503, 'very .* \(3 tries\)") as caught:
            await server.target().put_file(tmp_path / "file")
        assert len(server.requests) == 3
        assert len(str(caught.value)) < 300


async def test_a_put_follows_a_redirect_that_asks_for_a_put(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    async with Server(reply(307, b"", Location="/there"), reply(200, b"")) as server:
        await server.target().put_file(tmp_path / "file")
        assert server.requests == [("PUT", "/out.jsonl"), ("PUT", "/there")]
        assert server.bodies[1] == b"rows"
    async with Server(reply(302, b"", Location="/there")) as server:
        with pytest.raises(StorageError, match="status 302"):
            await server.target().put_file(tmp_path / "file")


async def test_an_expired_signed_url_is_named_without_its_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    query = "X-Amz-Date=20200101T000000Z&X-Amz-Expires=3600&X-Amz-Signature=0123456789abcdef"
    echo = f"<Error>Request has expired ?{query} sig 0123456789abcdef</Error>".encode()
    with caplog.at_level(logging.DEBUG):
        async with Server(reply(403, echo)) as server:
            for act in (
                server.target(f"/o?{query}").put_file(tmp_path / "file"),
                read(server.source(f"/o?{query}")),
                server.source(f"/o?{query}").info(),
            ):
                with pytest.raises(StorageError, match="expired at 2020-01-01T01:00:00Z") as caught:
                    await act
                assert "status 403" in str(caught.value)
                assert "0123456789abcdef" not in str(caught.value)
            assert len(server.requests) == 3
    ours = [record for record in caplog.records if record.name.startswith("airflow_vllm_batch")]
    assert not [record for record in ours if "0123456789abcdef" in record.getMessage()]


async def test_a_refused_login_is_not_repeated_in_the_message() -> None:
    async with Server(reply(401, b"bad password passw0rd for h3ader")) as server:
        source = server.source(login="me", password="passw0rd", headers={"X-Key": "h3ader"})
        with pytest.raises(StorageError, match=r"status 401, 'bad password \*\*\* for \*\*\*'; check the credentials"):
            await read(source)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


async def test_an_unreachable_server_ends_after_a_few_tries(closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}/in?X-Amz-Signature=0123456789abcdef"
    source = HttpSource(url.partition("?")[0], lambda: url, HttpSettings, AT_ONCE)
    with pytest.raises(StorageError, match="can't be reached") as caught:
        await read(source)
    assert "0123456789abcdef" not in f"{caught.value}{caught.value.__cause__}"


async def test_a_renewed_url_is_used_at_the_next_try() -> None:
    async with Server(reply(503, b""), reply()) as server:
        urls = iter(["/in?old", "/in?old", "/in?new", "/in?new"])
        source = HttpSource(server.url("/in"), lambda: server.url(next(urls)), HttpSettings, AT_ONCE)
        assert await read(source) == DATA
        assert [path for _, path in server.requests] == ["/in?old", "/in?new"]


async def test_access_completes_the_url_of_the_spec() -> None:
    async with Server(reply()) as server:
        public = server.url("/b/a%20b%2Fc+d")
        access = Access.from_document(StoreFile(urls={public: server.url(SIGNED_PATH)}))
        source = access.open_source(public, "input")
        assert b"".join([chunk async for chunk in source.stream()]) == DATA
        assert (source.uri, server.requests[0][1]) == (public, SIGNED_PATH)


async def test_a_private_certificate_authority_is_trusted_where_it_is_named(tmp_path: Path) -> None:
    authority, tls = make_authority(tmp_path)
    async with Server(reply(), tls=tls) as server:
        with pytest.raises(StorageError, match=r"TLS failed .*give the server's CA as ca_bundle"):
            await read(server.source())
        assert await read(server.source(ca_bundle=str(authority))) == DATA
        assert await read(server.source(ca_bundle=authority.read_text())) == DATA
        assert await read(server.source(verify=False)) == DATA


async def test_a_proxy_gets_the_url_unchanged() -> None:
    async with Server(reply()) as proxy:
        settings = HttpSettings(proxy_url=f"http://u:pr0xy-pw@127.0.0.1:{proxy.port}")
        url = f"http://storage.invalid{SIGNED_PATH}"
        assert await read(HttpSource("http://storage.invalid/b", lambda: url, lambda: settings, AT_ONCE)) == DATA
        assert proxy.requests == [("GET", url)]
        assert proxy.headers[0]["Proxy-Authorization"] == "Basic dTpwcjB4eS1wdw=="


async def test_a_server_that_falls_silent_ends_the_read() -> None:
    silent = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await silent.wait()
        return web.Response()

    async with Server(hang) as server:
        with pytest.raises(StorageError, match="can't be reached or broke off"):
            await read(server.source(request_timeout_seconds=0.05))
        with pytest.raises(StorageError, match=r"broke off \(TimeoutError\).*\(3 tries\)"):
            await server.target(request_timeout_seconds=0.01).put_file(Path(__file__))
        silent.set()
        assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("X-Amz-Date=20300102T030405Z&X-Amz-Expires=3600", datetime(2030, 1, 2, 4, 4, 5, tzinfo=UTC)),
        ("X-Goog-Date=20300102T030405Z&X-Goog-Expires=5", datetime(2030, 1, 2, 3, 4, 10, tzinfo=UTC)),
        ("AWSAccessKeyId=A&Expires=1893553445&Signature=x", datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("sv=2024&se=2030-01-02T03%3A04%3A05Z&sig=x", datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("se=2030-01-02&sig=x", datetime(2030, 1, 2, tzinfo=UTC)),
        ("", None),
        ("se=x", None),
        ("Expires=never", None),
        ("X-Amz-Date=today&X-Amz-Expires=3600", None),
    ],
)
def test_the_expiry_of_a_signed_url_is_read_where_it_can_be(query: str, expected: datetime | None) -> None:
    assert signed_url_expiry(f"https://h/b/k?{query}") == expected
