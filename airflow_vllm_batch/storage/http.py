"""One object by http(s): GET as a source, PUT as a target. URLs go out byte for byte as they were given.

A signed URL's query, logins and headers are secrets: no message or chained exception holds them.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

import aiohttp
from yarl import URL

from airflow_vllm_batch.storage.base import (
    ObjectChangedError,
    SourceInfo,
    StateUnreadableError,
    StorageError,
    StorageRefusedError,
    Written,
)
from airflow_vllm_batch.storage.settings import HttpSettings, StoreSettingsError
from airflow_vllm_batch.storage.uris import not_found_hint

CHUNK_BYTES = 1024 * 1024
MAX_REDIRECTS = 5
MAX_RETRY_AFTER_SECONDS = 30.0
UPLOAD_PATIENCE = 5
"""An upload's reply may take so many times the request timeout: megabytes may still wait in the kernel's buffers."""
BODY_CHARACTERS = 200

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
# These name hosts and what happened; the messages of other client errors hold whole URLs.
_SAFE_TO_CHAIN = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, TimeoutError)


@dataclass(frozen=True)
class Retries:
    """How often something is tried in all, and the first pause in seconds (doubled each time, with jitter)."""

    tries: int = 5
    pause_seconds: float = 0.5
    longest_pause_seconds: float = 10.0

    def pause(self, failures: int, retry_after: str | None = None) -> float:
        """Return the seconds to wait after so many failures in a row; a server's Retry-After may make them more."""
        longest = min(self.longest_pause_seconds, self.pause_seconds * 2.0 ** (failures - 1))
        asked = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        return max(longest * random.uniform(0.5, 1.0), min(asked, MAX_RETRY_AFTER_SECONDS))  # noqa: S311  jitter


class _PassingError(Exception):
    """A reply or fault after which another try may help; carries what to raise when the tries are used up."""

    def __init__(self, final: StorageError, retry_after: str | None = None) -> None:
        super().__init__(str(final))
        self.final = final
        self.retry_after = retry_after


class _HttpObject:
    def __init__(
        self, uri: str, url: Callable[[], str], settings: Callable[[], HttpSettings], retries: Retries | None = None
    ) -> None:
        """Take what to ask for anew at each request: a renewed URL or token is used at once.

        :param uri: without its query, for people.
        """
        self._uri = uri
        self._url = url
        self._settings = settings
        self._retries = retries or Retries()

    @property
    def uri(self) -> str:
        return self._uri

    @asynccontextmanager
    async def _request(
        self, method: str, headers: dict[str, str], open_body: Callable[[], BinaryIO] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, following redirects ourselves: headers with secrets stay with the first origin.

        :raises _PassingError: where another try may help.
        """
        settings = self._settings()
        url = self._parse(self._url())
        origin = url.origin()
        try:
            async with _session(settings, upload=open_body is not None) as session:
                for _ in range(MAX_REDIRECTS + 1):
                    own = _identity(settings) if url.origin() == origin else {}
                    reply = await session.request(
                        method,
                        url,
                        headers={**own, **headers},
                        data=open_body() if open_body else None,
                        proxy=settings.proxy_url.get_secret_value() if settings.proxy_url else None,
                        allow_redirects=False,
                    )
                    async with reply:
                        location = reply.headers.get("Location")
                        # A PUT goes on only where the server asks for the same request elsewhere.
                        followed = _REDIRECTS if method == "GET" else {307, 308}
                        if reply.status not in followed or location is None:
                            yield reply
                            return
                        url = url.join(self._parse(location, relative=True))
                raise StorageError(f"{self._uri}: more than {MAX_REDIRECTS} redirects")
        except _SAFE_TO_CHAIN as error:
            raise _PassingError(self._unreachable(error)) from error
        except aiohttp.ClientError as error:
            raise StorageError(f"{method} {self._uri} failed ({type(error).__name__}): check the URL") from None

    def _parse(self, text: str, *, relative: bool = False) -> URL:
        try:
            url = URL(text, encoded=True)
            if not relative and (url.scheme not in {"http", "https"} or not url.host):
                raise ValueError("no http(s) URL")
        except ValueError:
            raise StorageError(
                f"{self._uri}: {'a redirect goes to' if relative else 'this is'} no usable URL"
            ) from None
        return url

    def _unreachable(self, error: BaseException) -> StorageError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
            return StateUnreadableError(f"{self._uri}: TLS failed ({error}): give the server's CA as ca_bundle")
        what = str(error) or type(error).__name__
        return StateUnreadableError(
            f"{self._uri} can't be reached or broke off ({what}); check host, proxy and network"
        )

    async def _refuse(self, method: str, reply: aiohttp.ClientResponse) -> NoReturn:
        """Raise what a status of 400 and above means; the text has the status and the body's start."""
        try:
            body = (await reply.content.read(2000)).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError):
            body = ""
        said = f"{method} {self._uri}: status {reply.status}{_quoted(self._masked(body))}"
        if reply.status in {404, 410} and method == "GET":
            raise FileNotFoundError(errno.ENOENT, f"{said}{not_found_hint(urlsplit(self._uri).path)}", self._uri)
        if reply.status in _PASSING:
            raise _PassingError(StateUnreadableError(said), reply.headers.get("Retry-After"))
        raise StorageRefusedError(f"{said}{self._advice(reply.status)}")

    def _advice(self, status: int) -> str:
        if status in {401, 403, 404, 410}:
            expiry = signed_url_expiry(self._url())
            if expiry is not None and expiry < datetime.now(UTC):
                return f"; the signed URL expired at {expiry:%Y-%m-%dT%H:%M:%SZ}: sign one that outlives the run"
            if expiry is not None:
                return "; the signed URL is refused though not expired: it may be signed for another method or header"
            return "; check the credentials of the http connection and the path"
        if status == 413:
            return "; the server takes no object of this size: use several shards or an object store"
        return ""

    def _masked(self, text: str) -> str:
        settings = self._settings()
        secrets = [each.get_secret_value() for each in (settings.password, settings.token) if each is not None]
        secrets += [value.get_secret_value() for value in settings.headers.values()]
        query = urlsplit(self._url()).query
        secrets += [query, *(pair.partition("=")[2] for pair in query.split("&"))]
        for secret in sorted({each for raw in secrets for each in (raw, unquote(raw))}, key=len, reverse=True):
            if len(secret) >= 4:
                text = text.replace(secret, "***")
        return text


class HttpSource(_HttpObject):
    """Implements ``Source``. A broken download goes on where it broke, where the server can do that."""

    async def info(self) -> SourceInfo:
        """Ask by a GET that is closed after its headers: a URL signed for GET refuses HEAD."""
        failures = 0
        while True:
            try:
                async with self._get(0, None) as reply:
                    return SourceInfo(_length(reply), reply.headers.get("ETag"))
            except _PassingError as error:
                failures += 1
                if failures >= self._retries.tries:
                    raise error.final from error.__cause__
                await asyncio.sleep(self._retries.pause(failures, error.retry_after))

    async def stream(self, *, etag: str | None = None) -> AsyncIterator[bytes]:
        offset, failures, pinned = 0, 0, etag
        while True:
            before = offset
            try:
                async with self._get(offset, pinned) as reply:
                    found = reply.headers.get("ETag")
                    if pinned is not None and found != pinned:
                        raise ObjectChangedError(f"{self._uri} was replaced: its ETag is {found}, expected {pinned}")
                    pinned = found
                    skip = offset - _start(reply)
                    if skip < 0:
                        raise StorageError(f"{self._uri}: the server answered another range than was asked for")
                    length = _length(reply)
                    async for chunk in reply.content.iter_chunked(CHUNK_BYTES):
                        rest = chunk[skip:] if skip else chunk  # a server without ranges starts from the front again
                        skip -= len(chunk) - len(rest)
                        if rest:
                            offset += len(rest)
                            yield rest
                if length is not None and offset != length:
                    raise _PassingError(StateUnreadableError(f"{self._uri} ended after {offset} of {length} bytes"))
                return
            except _PassingError as error:
                failures = 1 if offset > before else failures + 1
                if failures >= self._retries.tries:
                    raise error.final from error.__cause__
                if offset and not _is_strong(pinned):
                    raise StorageError(
                        f"{self._uri}: truncated after {offset} bytes ({error.final}); the server gives no ETag, so "
                        "the rest can't be asked for safely: try again, or stage the file in an object store"
                    ) from error.__cause__
                await asyncio.sleep(self._retries.pause(failures, error.retry_after))

    @asynccontextmanager
    async def _get(self, offset: int, etag: str | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept-Encoding": "identity"}
        if offset and etag:
            headers |= {"Range": f"bytes={offset}-", "If-Range": etag}
        async with self._request("GET", headers) as reply:
            if reply.status not in {200, 206}:
                if reply.status < 400:
                    raise StorageError(f"GET {self._uri}: status {reply.status} is no object")
                await self._refuse("GET", reply)
            yield reply


class HttpTarget(_HttpObject):
    """Implements ``Target``: one PUT with its length, repeated from the start after a passing fault."""

    async def put_file(self, path: Path, *, content_type: str = "application/jsonl") -> Written:
        failures = 0
        headers = {"Content-Type": content_type}
        for name, value in self._settings().headers.items():
            if name.lower() == "content-type":  # a signed URL may be signed for another type
                headers["Content-Type"] = value.get_secret_value()
        while True:
            try:
                async with self._request("PUT", headers, lambda: path.open("rb")) as reply:
                    if 200 <= reply.status < 300:
                        return Written(reply.headers.get("ETag"), reply.status)
                    if reply.status < 400:
                        raise StorageError(f"PUT {self._uri}: status {reply.status}: give the URL it redirects to")
                    await self._refuse("PUT", reply)
            except _PassingError as error:
                failures += 1
                if failures >= self._retries.tries:
                    raise StorageError(f"{error.final} ({failures} tries)") from error.__cause__
                await asyncio.sleep(self._retries.pause(failures, error.retry_after))


def signed_url_expiry(url: str) -> datetime | None:
    """Return when a signed URL ends, null where that can't be read: S3 and GCS (v4 and v2), CloudFront, Azure SAS."""
    found = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    try:
        for prefix in ("x-amz", "x-goog"):
            if f"{prefix}-date" in found and f"{prefix}-expires" in found:
                signed = datetime.strptime(found[f"{prefix}-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
                return signed + timedelta(seconds=int(found[f"{prefix}-expires"]))
        if "expires" in found:
            return datetime.fromtimestamp(int(found["expires"]), UTC)
        if "se" in found and "sig" in found:
            expiry = datetime.fromisoformat(found["se"])
            return expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return None


@asynccontextmanager
async def _session(settings: HttpSettings, *, upload: bool) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session whose peer may not stay silent for long; there is no limit for the whole of a transfer.

    An upload's silence counts from the last chunk that went out: aiohttp's own read limit also runs while sending.
    """
    patience = settings.request_timeout_seconds * (UPLOAD_PATIENCE if upload else 1)
    async with asyncio.timeout(patience if upload else None) as limit:

        async def sent(*_: object) -> None:
            if upload and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + patience)

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(sent)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_tls(settings)),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=settings.connect_timeout_seconds,
                sock_read=None if upload else patience,
            ),
            auto_decompress=False,  # bytes as stored
            trust_env=True,
            trace_configs=[trace],
        ) as session:
            yield session


def _tls(settings: HttpSettings) -> ssl.SSLContext | bool:
    if not settings.verify:
        return False
    pem = settings.ca_pem()
    if pem is None:
        return True
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cadata=pem.decode())
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise StoreSettingsError("ca_bundle holds no PEM certificates") from error
    return context


def _identity(settings: HttpSettings) -> dict[str, str]:
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
    elif settings.login is not None:
        password = settings.password.get_secret_value() if settings.password else ""
        pair = base64.b64encode(f"{settings.login}:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {pair}"
    return headers


def _length(reply: aiohttp.ClientResponse) -> int | None:
    """Return the whole object's length, also for a part of it."""
    if reply.status == 206:
        total = reply.headers.get("Content-Range", "").rpartition("/")[2]
        return int(total) if total.isdecimal() else None
    return reply.content_length


def _start(reply: aiohttp.ClientResponse) -> int:
    if reply.status != 206:
        return 0
    found = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
    return int(found[1]) if found else 0


def _is_strong(etag: str | None) -> bool:
    return etag is not None and not etag.startswith("W/")


def _quoted(body: str) -> str:
    shown = " ".join(body.split())[:BODY_CHARACTERS]
    return f", {shown!r}" if shown else ""
