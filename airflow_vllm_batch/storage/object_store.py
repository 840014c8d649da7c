"""A folder in S3, Google Cloud Storage or Azure, over obstore. Knows no settings and nothing of what objects mean.

Every exception of the library is translated by its type and chained; its text is cut down first, since an S3 server
quotes the signed request, session token included, in its answer to a wrong signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from airflow_vllm_batch.storage.base import (
    Conditions,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNameError,
    StateRefusedError,
    StateUnreadableError,
    StorageError,
    StorageRefusedError,
)
from airflow_vllm_batch.storage.clients import ObstoreClient
from airflow_vllm_batch.storage.probing import probe_conditions
from airflow_vllm_batch.storage.uris import StoreKind, check_object_name, join_uri, not_found_hint

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutMode

CHUNK_BYTES = 1024 * 1024
PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 2
"""Each part must be through within ``request_timeout_seconds``: more of them would share a slow line."""
MAX_PARTS = 9_000
"""S3 takes 10,000; larger files get larger parts."""
RESUMES = 3
"""How often a broken read goes on where it broke, without a byte of progress in between."""

_CONTENT_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".zst": "application/zstd",
    ".gz": "application/gzip",
}


class ObjectStore:
    """Implements ``Store``.

    :param client: of the bucket, without a prefix.
    :param prefix: key of the folder without its trailing slash, empty for the whole bucket.
    :param uri: of the folder, as people know it.
    """

    def __init__(self, client: ObstoreClient, *, kind: StoreKind, prefix: str, uri: str) -> None:
        self._client = client
        self._kind: StoreKind = kind
        self._prefix = f"{prefix}/" if prefix else ""
        self._uri = join_uri(uri, "")

    def uri(self, name: str = "") -> str:
        return f"{self._uri}{name}"

    async def head(self, name: str) -> ObjectInfo:
        with self._translated("look at", name):
            return _info(name, await obstore.head_async(self._client, self._key(name)))

    async def get(self, name: str) -> bytes:
        return (await self.get_with_info(name))[0]

    async def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        with self._translated("read", name):
            reply = await obstore.get_async(self._client, self._key(name))
            return bytes(await reply.bytes_async()), _info(name, reply.meta)

    async def stream(self, name: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        offset, failures = 0, 0
        while True:
            reply = await self._open(name, etag, offset)
            size, etag = reply.meta["size"], reply.meta["e_tag"]
            chunks = aiter(reply.stream(min_chunk_size=CHUNK_BYTES))
            while True:
                try:
                    with self._translated("read", name):
                        chunk = bytes(await anext(chunks, b""))
                except StateUnreadableError:
                    failures += 1
                    # Without an ETag the rest could be that of another object.
                    if etag is None or failures > RESUMES:
                        raise
                    break
                if not chunk:
                    if offset != size:
                        raise StateUnreadableError(f"{self.uri(name)} ended after {offset} of {size} bytes; try again")
                    return
                offset, failures = offset + len(chunk), 0
                yield chunk

    async def put(self, name: str, data: bytes) -> ObjectInfo:
        with self._translated("write", name):
            return await self._put(name, data, "overwrite")

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        # "Exists" may be the echo of our own put, whose reply was lost: the object itself tells. Absent again means
        # that the put collided with another one that came to nothing.
        for _ in range(3):
            try:
                with self._translated("create", name):
                    return await self._put(name, data, "create")
            except ObjectExistsError:
                with contextlib.suppress(FileNotFoundError):
                    present, info = await self.get_with_info(name)
                    if present == data:
                        return info
                    raise
        raise StorageError(f"{self.uri(name)} can't be created: the store says it exists, and that it does not")

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        try:
            with self._translated("replace", name):
                return await self._put(name, data, {"e_tag": etag})
        except ObjectChangedError:
            with contextlib.suppress(FileNotFoundError):  # as in put_new: the put that changed it may be ours
                present, info = await self.get_with_info(name)
                if present == data:
                    return info
            raise

    async def put_file(self, name: str, path: Path) -> ObjectInfo:
        size = path.stat().st_size
        with self._translated("write", name):
            await obstore.put_async(
                self._client,
                self._key(name),
                path,
                attributes=_attributes(name),
                chunk_size=max(PART_BYTES, math.ceil(size / MAX_PARTS)),
                max_concurrency=PARTS_AT_ONCE,
            )
        stored = await self.head(name)
        if stored.size != size:
            raise StorageError(
                f"{self.uri(name)} has {stored.size} bytes after a put of {size} from {path}: put it again"
            )
        return stored

    async def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._translated("delete", name):
            await obstore.delete_async(self._client, self._key(name))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix:
            check_object_name(prefix.removesuffix("/"), self._kind, uri=self.uri(prefix))
        full = f"{self._prefix}{prefix}"
        found: list[ObjectInfo] = []
        with self._translated("list", prefix):
            async for page in obstore.list(self._client, full or None, chunk_size=1000):
                # The marker object of a folder, ``folder/``, is listed without its slash: it is no object below it.
                found.extend(
                    _info(meta["path"].removeprefix(self._prefix), meta)
                    for meta in page
                    if meta["path"].startswith(full)
                )
                await asyncio.sleep(0)
        for info in sorted(found):  # not every look-alike of S3 orders by key
            yield info

    async def probe(self) -> Conditions:
        return await probe_conditions(self)

    def _key(self, name: str) -> str:
        return f"{self._prefix}{check_object_name(name, self._kind, uri=self.uri(name))}"

    async def _put(self, name: str, data: bytes, mode: PutMode) -> ObjectInfo:
        result = await obstore.put_async(
            self._client, self._key(name), data, mode=mode, attributes=_attributes(name), use_multipart=False
        )
        return ObjectInfo(name, len(data), result["e_tag"], None)

    async def _open(self, name: str, etag: str | None, offset: int) -> GetResult:
        options: GetOptions = {}
        if etag is not None:
            options["if_match"] = etag
        if offset:
            options["range"] = {"offset": offset}
        with self._translated("read", name):
            reply = await obstore.get_async(self._client, self._key(name), options=options)
        if etag is not None and reply.meta["e_tag"] != etag:  # a store that ignores If-Match
            raise ObjectChangedError(
                f"{self.uri(name)} was replaced: its ETag is {reply.meta['e_tag']}, expected {etag}"
            )
        return reply

    @contextlib.contextmanager
    def _translated(self, what: str, name: str) -> Iterator[None]:
        """Turn the library's exceptions into ours. A read that fails leaves it open whether the object exists."""
        uri = self.uri(name)
        reads = what in {"look at", "read", "list"}
        failure = StateUnreadableError if reads else StorageError
        refusal = StateRefusedError if reads else StorageRefusedError
        try:
            yield
        except ObjectNameError:
            raise
        except FileNotFoundError as error:
            _shorten(error)
            if what in {"look at", "read", "delete"}:
                hint = not_found_hint(name)
                raise FileNotFoundError(errno.ENOENT, f"no such object, or no such bucket{hint}", uri) from error
            raise refusal(f"can't {what} {uri!r}: the bucket or container does not exist; create it first") from error
        except AlreadyExistsError as error:
            raise ObjectExistsError(f"{uri!r} exists already") from _shorten(error)
        except PreconditionError as error:
            raise ObjectChangedError(f"{uri!r} was replaced meanwhile: its ETag is another one") from _shorten(error)
        except PermissionDeniedError as error:
            raise refusal(
                f"can't {what} {uri!r}: permission denied ({_shorten(error)}). The credentials may have expired, may "
                "be wrong for this endpoint, or lack the right for this bucket and prefix"
            ) from error
        except UnauthenticatedError as error:
            raise refusal(
                f"can't {what} {uri!r}: no valid credentials ({_shorten(error)}). Give keys in the store file or "
                "connection, or a role to the pod or host"
            ) from error
        except (ValueError, InvalidPathError) as error:
            raise failure(
                f"can't {what} {uri!r}: the store holds an object whose name can't be held exactly, such as 'a//b' "
                f"({_shorten(error)}); rename it or use another folder"
            ) from error
        except (BaseError, OSError, NotImplementedError) as error:
            raise failure(
                f"can't {what} {uri!r}: {_shorten(error)}. Check that the endpoint can be reached from here, its "
                "certificate, the region and the bucket's name, and that the credentials may do this"
            ) from error


def _info(name: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], meta["e_tag"], meta["last_modified"])


def _attributes(name: str) -> dict[str, str]:
    return {"Content-Type": _CONTENT_TYPES.get(Path(name).suffix, "application/octet-stream")}


def _shorten(error: Exception) -> Exception:
    """Cut an exception's text down to what happened, and return it.

    Kept are the first line up to an error document, that document's code and message, and what the network said.
    """
    text = str(error.args[0]) if error.args else type(error).__name__
    network = _network_cause(text)
    if (match := re.search(r"<\?xml|<Error|<html|\{|\n", text)) is not None:
        document = text[match.start() :]
        found = [re.search(rf"<{tag}>([^<]{{1,200}})", document) for tag in ("Code", "Message")]
        text = f"{text[: match.start()].strip()} {': '.join(each[1] for each in found if each)}".strip()
    error.args = (f"{text[:400].strip(' :')}{network}",)
    return error


def _network_cause(text: str) -> str:
    """Return why no connection came about: the library's own line says just "error sending request"."""
    if "HttpError {" not in text:
        return ""
    if found := re.search(r"InvalidCertificate\(\s*(\w+)", text):
        return f": certificate not accepted ({found[1]}); give the server's CA as ca_bundle"
    if found := re.search(r'(?:message|error): "([^"]{1,150})"', text):
        return f": {found[1]}"
    return ": no answer in time" if "source: TimedOut" in text else ""
