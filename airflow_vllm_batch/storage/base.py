"""What the rest of the package may ask of storage: three small protocols and the errors they raise.

A ``Store`` is a folder of objects, a ``Source`` one object to read, a ``Target`` one object to write. Names are
literal: never parsed as URLs, never altered. Nothing here knows what the objects mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol


class StorageError(OSError):
    """Storage refused or could not be reached. The message says which object, what was tried and what to do."""


class StorageRefusedError(StorageError):
    """Storage answered, and said no: permission, credentials, quota, a full disk, a missing bucket.

    Somebody has to change something, so waiting helps less than after any other ``StorageError``.
    """


class StateUnreadableError(StorageError):
    """Whether an object exists can't be told: not the same as its absence."""


class StateRefusedError(StateUnreadableError, StorageRefusedError):
    """Whether an object exists can't be told, since we may not look."""


class ObjectNameError(ValueError):
    """A name that the store can't hold exactly, such as ``a//b`` or ``a/../b``; refused, never altered."""


class ObjectExistsError(StorageError):
    """A create-only put found an object there."""


class ObjectChangedError(StorageError):
    """A conditional put or read found another ETag than the one it was given."""


class ObjectInfo(NamedTuple):
    name: str
    """Relative to the folder it was asked of."""
    size: int
    """Bytes as stored."""
    etag: str | None
    modified: datetime | None


class Conditions(NamedTuple):
    """What a store really enforces, found by trying it."""

    create_only: bool
    if_match: bool


class Store(Protocol):
    """A folder of objects; names are relative to it and use ``/``.

    Every method may raise ``StorageError``, ``ObjectNameError`` where it takes a name, and ``FileNotFoundError``
    where it reads one object. No other exception of a store library leaves an implementation. Puts are atomic: a
    reader sees the old object or the new one, also when the writer dies half-way.
    """

    def uri(self, name: str = "") -> str:
        """Return the full URI of an object or of the folder, for people and for XCom; holds no secret."""
        ...

    async def head(self, name: str) -> ObjectInfo: ...

    async def get(self, name: str) -> bytes:
        """Return a whole small object."""
        ...

    async def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole small object and the ETag that belongs to just these bytes."""
        ...

    def stream(self, name: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        """Read an object in chunks; with ``etag``, raise ``ObjectChangedError`` where it is another one."""
        ...

    async def put(self, name: str, data: bytes) -> ObjectInfo:
        """Create or replace an object."""
        ...

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        """Create an object; raises ``ObjectExistsError`` where there is one.

        A reply may be lost and the put repeated by the client library: an "exists" whose object has exactly these
        bytes counts as created. Best effort where the store ignores conditions (see :meth:`probe`).
        """
        ...

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        """Replace an object that still has this ETag; raises ``ObjectChangedError`` where it has another one.

        As with :meth:`put_new`, an object that has exactly these bytes already counts as replaced.
        """
        ...

    async def put_file(self, name: str, path: Path) -> ObjectInfo:
        """Create or replace an object with a file's bytes, in bounded memory (multipart where the store has it)."""
        ...

    async def delete(self, name: str) -> None:
        """Delete an object; it is no error where there is none."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List the objects whose name starts with a prefix that is empty or ends in ``/``, ordered by name."""
        ...

    async def probe(self) -> Conditions:
        """Write, condition and delete objects below ``RunLayout.probe_prefix`` and say what the store enforces.

        :raises StorageError: where the folder can't be written.
        """
        ...


class SourceInfo(NamedTuple):
    size: int | None
    """Bytes as stored; null where a server does not say."""
    etag: str | None


class Source(Protocol):
    """One object to read. Raises ``FileNotFoundError`` and ``StorageError``."""

    @property
    def uri(self) -> str:
        """Without its query: fit for people."""
        ...

    async def info(self) -> SourceInfo: ...

    def stream(self, *, etag: str | None = None) -> AsyncIterator[bytes]:
        """Read the bytes as stored; with ``etag``, raise ``ObjectChangedError`` where the object is another one."""
        ...


class Written(NamedTuple):
    """What a target said of an object that was put."""

    etag: str | None
    status: int | None
    """Status of an http(s) reply; null for an object store."""


class Target(Protocol):
    """One object to write, in one piece. Raises ``StorageError``."""

    @property
    def uri(self) -> str:
        """Without its query: fit for people."""
        ...

    async def put_file(self, path: Path, *, content_type: str = "application/jsonl") -> Written:
        """Put a file's bytes; a repeated put sends the same bytes from the start."""
        ...
