"""What an S3 client does on the wire, against a small server that answers as it is told."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import obstore
import pytest
from aiohttp import web

from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import (
    ObjectChangedError,
    ObjectExistsError,
    StateUnreadableError,
    StorageError,
    Store,
)
from airflow_vllm_batch.storage.settings import S3Settings, StoreFile, StoreSettingsError
from tests.support.certificates import make_authority
from tests.support.seaweed import SeaweedServer

Answer = Callable[[web.BaseRequest], web.StreamResponse | Awaitable[web.StreamResponse]]


class Wire:
    def __init__(self) -> None:
        self.requests: list[web.BaseRequest] = []
        self.port = 0


@asynccontextmanager
async def serving(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Serve the answers one after the other, the last one again and again."""
    wire, left = Wire(), list(answers)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        wire.requests.append(request)
        await request.read()
        given = left.pop(0) if len(left) > 1 else left[0]
        found = given(request)
        return await found if inspect.isawaitable(found) else found

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    wire.port = runner.addresses[0][1]
    try:
        yield wire
    finally:
        await runner.cleanup()


def folder(endpoint_url: str, **settings: object) -> Store:
    keys = {"access_key_id": "AK", "secret_access_key": "s3cr3t-key", "session_token": "s3ss1on-token"}
    s3 = S3Settings.model_validate({**keys, "endpoint_url": endpoint_url, "region": "eu-west-1", **settings})
    return Access.from_document(StoreFile(stores={"output": s3})).open_folder("s3://bkt/run 1", "output")


def ok(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(headers={"ETag": '"e"'})


def fault(status: int, code: str = "", message: str = "", rest: str = "") -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{rest}</Error>" if code else ""
    return lambda request: web.Response(status=status, text=body, content_type="application/xml")


async def test_kms_settings_and_the_content_type_reach_the_server() -> None:
    async with serving(ok) as wire:
        store = folder(f"http://127.0.0.1:{wire.port}", sse="aws:kms", sse_kms_key_id="arn:aws:kms:eu-west-1:1:key/k")
        await store.put("a b#1.json", b"{}")
        (request,) = wire.requests
        assert request.raw_path == "/bkt/run%201/a%20b%231.json"
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:aws:kms:eu-west-1:1:key/k"
        assert request.headers["x-amz-security-token"] == "s3ss1on-token"
        assert request.headers["Content-Type"] == "application/json"


async def test_a_virtual_hosted_bucket_is_part_of_the_host() -> None:
    async with serving(ok) as proxy:
        proxy_url = f"http://127.0.0.1:{proxy.port}"
        await folder("http://storage.invalid", addressing_style="virtual", proxy_url=proxy_url).put("a", b"")
        assert proxy.requests[0].headers["Host"] == "bkt.storage.invalid"
        assert proxy.requests[0].raw_path == "http://bkt.storage.invalid/run%201/a"


@pytest.mark.parametrize("form", ["path", "text", "environment"])
async def test_a_private_certificate_authority_is_trusted_where_it_is_named(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, tls = make_authority(tmp_path)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    async with serving(ok, tls=tls) as wire:
        endpoint = f"https://localhost:{wire.port}"
        with pytest.raises(StorageError, match=r"certificate not accepted \(UnknownIssuer\); give the server's CA"):
            await folder(endpoint).put("a", b"")
        if form == "environment":
            monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        settings = {"path": {"ca_bundle": str(authority)}, "text": {"ca_bundle": authority.read_text()}}.get(form, {})
        await folder(endpoint, **settings).put("a", b"")
        assert len(wire.requests) == 1


async def test_verification_is_off_only_on_demand(tmp_path: Path) -> None:
    _, tls = make_authority(tmp_path)
    async with serving(ok, tls=tls) as wire:
        await folder(f"https://localhost:{wire.port}", verify=False).put("a", b"")


@pytest.mark.parametrize(
    "ca_bundle", ["/no/such/file.pem", "-----BEGIN CERTIFICATE-----\nzz\n-----END CERTIFICATE-----"]
)
def test_a_certificate_bundle_that_is_none_is_refused_when_it_is_opened(ca_bundle: str) -> None:
    with pytest.raises(StoreSettingsError, match="ca_bundle"):
        folder("https://localhost:1", ca_bundle=ca_bundle)


async def test_a_proxy_gets_the_request() -> None:
    async with serving(ok) as proxy:
        store = folder("http://storage.invalid:9000", proxy_url=f"http://user:pr0xy-pw@127.0.0.1:{proxy.port}")
        await store.put("a", b"")
        assert proxy.requests[0].headers["Host"] == "storage.invalid:9000"
        assert proxy.requests[0].headers["Proxy-Authorization"] == "Basic dXNlcjpwcjB4eS1wdw=="


async def test_a_wrong_signature_does_not_echo_the_signed_request() -> None:
    echo = "<CanonicalRequest>x-amz-security-token:s3ss1on-token</CanonicalRequest>"
    async with serving(fault(403, "SignatureDoesNotMatch", "Check your key.", echo)) as wire:
        store = folder(f"http://127.0.0.1:{wire.port}")
        for act in (store.put("a", b""), store.get("a"), anext(aiter(store.list()))):
            with pytest.raises(StorageError, match="SignatureDoesNotMatch: Check your key") as caught:
                await act
            assert "s3ss1on-token" not in f"{caught.value}{caught.value.__cause__}"


async def test_a_read_that_is_refused_leaves_open_whether_the_object_exists() -> None:
    async with serving(fault(403, "AccessDenied", "no")) as wire:
        store = folder(f"http://127.0.0.1:{wire.port}")
        for act in (store.get("a"), store.head("a"), anext(aiter(store.list()))):
            with pytest.raises(StateUnreadableError):
                await act


async def test_a_put_into_a_missing_bucket_says_so() -> None:
    async with serving(fault(404, "NoSuchBucket", "none")) as wire:
        with pytest.raises(StorageError, match="the bucket or container does not exist"):
            await folder(f"http://127.0.0.1:{wire.port}").put("a", b"")


async def test_a_missing_key_with_a_plus_is_quoted_with_a_hint() -> None:
    async with serving(fault(404, "NoSuchKey", "none")) as wire:
        with pytest.raises(FileNotFoundError, match=r"writes? a space as '\+'.*'s3://bkt/run 1/a\+b'"):
            await folder(f"http://127.0.0.1:{wire.port}").get("a+b")


async def test_a_create_whose_reply_was_lost_is_ours() -> None:
    def there(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b"mine", headers={"ETag": '"e"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"})

    async with serving(fault(503), fault(412, "PreconditionFailed", "exists"), there) as wire:
        assert (await folder(f"http://127.0.0.1:{wire.port}").put_new("a", b"mine")).etag == '"e"'
        assert [request.method for request in wire.requests] == ["PUT", "PUT", "GET"]
        assert wire.requests[0].headers["If-None-Match"] == "*"
    async with serving(fault(412, "PreconditionFailed", "exists"), there) as wire:
        with pytest.raises(ObjectExistsError):
            await folder(f"http://127.0.0.1:{wire.port}").put_new("a", b"other")


async def test_a_create_that_is_said_to_exist_but_does_not_is_tried_again() -> None:
    async with serving(fault(412, "PreconditionFailed", "exists"), fault(404, "NoSuchKey", "none"), ok) as wire:
        await folder(f"http://127.0.0.1:{wire.port}").put_new("a", b"mine")
        assert [request.method for request in wire.requests] == ["PUT", "GET", "PUT"]


async def test_a_listing_with_a_foreign_name_says_what_is_wrong() -> None:
    entry = "<Contents><Key>run 1/a//b</Key><LastModified>2015-10-21T07:28:00Z</LastModified><Size>1</Size></Contents>"
    page = f"<ListBucketResult>{entry}<IsTruncated>false</IsTruncated></ListBucketResult>"
    async with serving(lambda request: web.Response(text=page)) as wire:
        with pytest.raises(StorageError, match=r"an object whose name can't be held exactly, .*a//b.*; rename it"):
            await anext(aiter(folder(f"http://127.0.0.1:{wire.port}").list()))


@pytest.mark.parametrize("later_etag", ['"e"', '"f"'])
async def test_a_broken_stream_goes_on_where_it_broke_but_never_in_another_object(later_etag: str) -> None:
    data = bytes(range(256)) * 20_000
    modified = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}

    async def cut(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5120000", "ETag": '"e"', **modified})
        await response.prepare(request)
        await response.write(data[:3_000_000])
        assert request.transport is not None
        request.transport.close()
        return response

    def rest(request: web.BaseRequest) -> web.StreamResponse:
        start = int(request.headers["Range"].removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": later_etag, "Content-Range": f"bytes {start}-5119999/5120000", **modified}
        return web.Response(status=206, body=data[start:], headers=headers)

    async with serving(cut, rest) as wire:
        chunks = folder(f"http://127.0.0.1:{wire.port}").stream("a")
        if later_etag == '"e"':
            assert b"".join([chunk async for chunk in chunks]) == data
        else:
            with pytest.raises(ObjectChangedError, match=r'its ETag is "f", expected "e"'):
                [chunk async for chunk in chunks]


async def test_a_dead_endpoint_ends_with_its_reason() -> None:
    with pytest.raises(StateUnreadableError, match=r"Connection refused.*Check that the endpoint can be reached"):
        await folder("http://127.0.0.1:9").get("a")


async def test_ambient_keys_come_from_the_shared_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = AKTEAM\naws_secret_access_key = s3cr3t%key\n")
    (tmp_path / "config").write_text("[profile team]\nregion = ap-south-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    async with serving(ok) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
        await Access.ambient().open_folder("s3://bkt/run", "output").put("a", b"")
        assert "Credential=AKTEAM/" in wire.requests[0].headers["Authorization"]
        assert "/ap-south-1/s3/" in wire.requests[0].headers["Authorization"]


@pytest.mark.s3
async def test_a_folder_marker_is_no_object_of_the_folder(s3_server: SeaweedServer) -> None:
    raw = s3_server.raw_store("tests")
    s3_server.put_raw("tests", "marked/", b"")
    await obstore.put_async(raw, "marked/a", b"1")
    s3 = S3Settings(
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        endpoint_url=s3_server.endpoint_url,
    )
    access = Access.from_document(StoreFile(stores={"input": s3}))
    assert [info.name async for info in access.open_folder("s3://tests/marked/", "input").list()] == ["a"]
    assert (await access.open_source("s3a://tests/marked/a", "input").info()).size == 1
