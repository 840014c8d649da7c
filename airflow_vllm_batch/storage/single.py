"""One object of a store as a ``Source`` or a ``Target``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from airflow_vllm_batch.storage.base import SourceInfo, Store, Written


class StoreSource:
    """Implements ``Source``."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def uri(self) -> str:
        return self._store.uri(self._name)

    async def info(self) -> SourceInfo:
        found = await self._store.head(self._name)
        return SourceInfo(found.size, found.etag)

    def stream(self, *, etag: str | None = None) -> AsyncIterator[bytes]:
        return self._store.stream(self._name, etag=etag)


class StoreTarget:
    """Implements ``Target``."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def uri(self) -> str:
        return self._store.uri(self._name)

    async def put_file(self, path: Path, *, content_type: str = "application/jsonl") -> Written:
        """Put the file; the content type follows from the object's name, as everywhere in a store."""
        return Written((await self._store.put_file(self._name, path)).etag, None)
