"""A folder on a local or mounted disk, with durable atomic puts and real conditions between processes.

Puts are written beside the object, synced, then renamed over it; every writer holds the folder's lock for the rename.
Written by hand and not over a store library: that one refuses ``a#1``, has no If-Match on disks and syncs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

from airflow_vllm_batch.storage.base import (
    Conditions,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    StateRefusedError,
    StateUnreadableError,
    StorageError,
    StorageRefusedError,
)
from airflow_vllm_batch.storage.probing import probe_conditions
from airflow_vllm_batch.storage.uris import LOCAL_PRIVATE_PREFIX, check_object_name

CHUNK_BYTES = 1024 * 1024
LEFTOVER_SECONDS = 24 * 3600.0
_LOCK_NAME = f"{LOCAL_PRIVATE_PREFIX}lock"
_TEMPORARY_PREFIX = f"{LOCAL_PRIVATE_PREFIX}put-"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    }
)

# flock on NFS is a lock of the process: threads of one process exclude each other here.
_THREADS = threading.Lock()

_Result = TypeVar("_Result")


class LocalStore:
    """Implements ``Store``. An ETag is made of inode, modification time and size.

    :param folder: need not exist; it is created by the first put.
    :param uri: what people see, with a trailing slash; the path where it is null.
    """

    def __init__(self, folder: Path, *, uri: str | None = None) -> None:
        self._folder = folder
        self._uri = f"{folder}/" if uri is None else uri

    def uri(self, name: str = "") -> str:
        return f"{self._uri}{name}"

    async def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        return await self._read("look at", name, lambda: _info(name, path.stat()) if path.is_file() else _missing(path))

    async def get(self, name: str) -> bytes:
        return (await self.get_with_info(name))[0]

    async def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        path = self._path(name)

        def read() -> tuple[bytes, ObjectInfo]:
            with path.open("rb") as file:  # the descriptor pins the inode: a rename in between changes neither
                return file.read(), _info(name, os.fstat(file.fileno()))

        return await self._read("read", name, read)

    async def stream(self, name: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        path = self._path(name)
        file: BinaryIO = await self._read("read", name, lambda: path.open("rb"))
        with file:
            before = _info(name, os.fstat(file.fileno()))
            if etag is not None and before.etag != etag:
                raise ObjectChangedError(f"{self.uri(name)} was replaced: its ETag is {before.etag}, expected {etag}")
            while chunk := await self._read("read", name, lambda: file.read(CHUNK_BYTES)):
                yield chunk
            if _info(name, os.fstat(file.fileno())).etag != before.etag:
                raise ObjectChangedError(f"{self.uri(name)} was written to while it was read")

    async def put(self, name: str, data: bytes) -> ObjectInfo:
        return await self._write(name, lambda file: file.write(data), _always)

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        path = self._path(name)

        def check() -> ObjectInfo | None:
            if not path.exists():
                return None
            if path.read_bytes() != data:
                raise ObjectExistsError(f"{self.uri(name)} exists already, with other bytes")
            return _info(name, path.stat())

        return await self._write(name, lambda file: file.write(data), check)

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        path = self._path(name)

        def check() -> None:
            found = _info(name, path.stat()).etag if path.exists() else None
            if found != etag:
                raise ObjectChangedError(f"{self.uri(name)} was replaced: its ETag is {found}, expected {etag}")

        return await self._write(name, lambda file: file.write(data), check)

    async def put_file(self, name: str, path: Path) -> ObjectInfo:
        size = path.stat().st_size

        def copy(file: BinaryIO) -> None:
            _remove_leftovers(self._path(name).parent)
            with path.open("rb") as source:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
            if file.tell() != size:
                raise StorageError(f"{path} changed while it was put: {file.tell()} bytes copied, it had {size}")

        return await self._write(name, copy, _always)

    async def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            await self._read("delete", name, path.unlink)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix:
            check_object_name(prefix.removesuffix("/"), "local", uri=self.uri(prefix))
        root = self._folder / prefix

        def walk() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            for folder, folders, files in os.walk(root, onerror=_raise_unless_missing, followlinks=True):
                folders[:] = [each for each in folders if not each.startswith(LOCAL_PRIVATE_PREFIX)]
                for file in files:
                    if file.startswith(LOCAL_PRIVATE_PREFIX):
                        continue
                    path = Path(folder, file)
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, or a dangling link
                        if path.is_file():
                            found.append(_info(path.relative_to(self._folder).as_posix(), path.stat()))
            return sorted(found)

        for info in await self._read("list", prefix, walk):
            yield info

    async def probe(self) -> Conditions:
        found = await probe_conditions(self)
        locks = await self._read("lock", "", lambda: _can_lock(self._folder))
        return Conditions(found.create_only and locks, found.if_match and locks)

    def _path(self, name: str) -> Path:
        return self._folder / check_object_name(name, "local", uri=self.uri(name))

    async def _read(self, what: str, name: str, act: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.to_thread(act)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.uri(name)) from error
        except StorageError:
            raise
        except OSError as error:
            kind = StateRefusedError if error.errno in _REFUSALS else StateUnreadableError
            raise kind(f"can't {what} {self.uri(name)}: {error.strerror or error}") from error

    async def _write(
        self, name: str, fill: Callable[[BinaryIO], object], check: Callable[[], ObjectInfo | None]
    ) -> ObjectInfo:
        """Fill a file beside the object, then, under the lock, check the condition and rename.

        :param check: raises where the condition fails, or returns the object that makes the put needless.
        """
        path = self._path(name)

        def write() -> ObjectInfo:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
            try:
                with temporary.open("xb") as file:
                    fill(file)
                    file.flush()
                    now = time.time_ns()  # the kernel's own stamp is coarse: two puts in 4 ms would look alike
                    os.utime(file.fileno(), ns=(now, now))
                    os.fsync(file.fileno())
                    info = _info(name, os.fstat(file.fileno()))
                with _locked(path.parent):
                    if present := check():
                        return present
                    # A crash before the rename leaves the old object and a hidden file, after it the new object.
                    temporary.replace(path)
                _sync_folder(path.parent)
                return info
            finally:
                temporary.unlink(missing_ok=True)

        try:
            return await asyncio.to_thread(write)
        except StorageError:
            raise
        except OSError as error:
            kind = StorageRefusedError if error.errno in _REFUSALS else StorageError
            raise kind(f"can't write {self.uri(name)}: {error.strerror or error}{_advice(error)}") from error


def _always() -> None:
    """Stand in for the condition of a put that has none."""


def _info(name: str, found: os.stat_result) -> ObjectInfo:
    etag = f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"'
    return ObjectInfo(name, found.st_size, etag, datetime.fromtimestamp(found.st_mtime, UTC))


def _missing(path: Path) -> ObjectInfo:
    path.stat()  # tells a missing file from one that may not be looked at
    raise FileNotFoundError(path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "; free space or raise the quota, nothing written before is lost"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"; the user id {os.getuid()} needs to write there"
        case errno.ENOTDIR | errno.EISDIR | errno.EEXIST:
            return "; a file and a folder have the same name"
    return ""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock between processes and threads; yields false where the disk knows no locks."""
    with _THREADS:
        descriptor = _open_lock(folder)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                held = True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                held = False
            yield held
        finally:
            os.close(descriptor)


def _open_lock(folder: Path) -> int:
    path = folder / _LOCK_NAME
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # made by another user: a reader may lock as well


def _can_lock(folder: Path) -> bool:
    with _locked(folder) as held:
        return held


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some mounts can't sync a folder; the file itself is synced
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished puts of killed processes; a live one touches its file far more often than once a day."""
    oldest = time.time() - LEFTOVER_SECONDS
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
