"""A folder in memory with the conditions of a real store: for tests, and for trying a DAG without storage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

from airflow_vllm_batch.storage.base import Conditions, ObjectChangedError, ObjectExistsError, ObjectInfo
from airflow_vllm_batch.storage.probing import probe_conditions
from airflow_vllm_batch.storage.uris import check_object_name

CHUNK_BYTES = 1024 * 1024


class MemoryStore:
    """Implements ``Store`` within one process. Each put gives a new ETag, also for the same bytes.

    A test makes storage fail by overriding :meth:`before`.
    """

    def __init__(self, uri: str = "memory://run/") -> None:
        self._uri = uri
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._puts = 0

    async def before(self, operation: str, name: str) -> None:
        """Do nothing; called before each operation by its method's name, and may raise in its place."""

    def uri(self, name: str = "") -> str:
        return f"{self._uri}{name}"

    async def head(self, name: str) -> ObjectInfo:
        await self.before("head", name)
        return self._find(name)[1]

    async def get(self, name: str) -> bytes:
        await self.before("get", name)
        return self._find(name)[0]

    async def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        await self.before("get_with_info", name)
        return self._find(name)

    async def stream(self, name: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        await self.before("stream", name)
        data, info = self._find(name)
        if etag is not None and info.etag != etag:
            raise ObjectChangedError(f"{self.uri(name)} was replaced: its ETag is {info.etag}, expected {etag}")
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    async def put(self, name: str, data: bytes) -> ObjectInfo:
        await self.before("put", name)
        return self._keep(name, data)

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        await self.before("put_new", name)
        present = self._objects.get(check_object_name(name))
        if present is None:
            return self._keep(name, data)
        if present[0] != data:
            raise ObjectExistsError(f"{self.uri(name)} exists already, with other bytes")
        return present[1]

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        await self.before("put_if_match", name)
        present = self._objects.get(check_object_name(name))
        found = present[1].etag if present else None
        if found != etag:
            raise ObjectChangedError(f"{self.uri(name)} was replaced: its ETag is {found}, expected {etag}")
        return self._keep(name, data)

    async def put_file(self, name: str, path: Path) -> ObjectInfo:
        await self.before("put_file", name)
        return self._keep(name, path.read_bytes())

    async def delete(self, name: str) -> None:
        await self.before("delete", name)
        self._objects.pop(check_object_name(name), None)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self.before("list", prefix)
        for name in sorted(self._objects):
            if name.startswith(prefix) and (found := self._objects.get(name)):
                yield found[1]

    async def probe(self) -> Conditions:
        return await probe_conditions(self)

    def _find(self, name: str) -> tuple[bytes, ObjectInfo]:
        try:
            return self._objects[check_object_name(name, uri=self.uri(name))]
        except KeyError:
            raise FileNotFoundError(self.uri(name)) from None

    def _keep(self, name: str, data: bytes) -> ObjectInfo:
        self._puts += 1
        info = ObjectInfo(check_object_name(name, uri=self.uri(name)), len(data), f'"{self._puts}"', datetime.now(UTC))
        self._objects[name] = (bytes(data), info)
        return info
