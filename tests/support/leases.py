"""Time that only moves when told, stores that misbehave on demand, and writers that want a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from airflow_vllm_batch.storage.base import ObjectInfo, StorageError, Store
from airflow_vllm_batch.storage.lease import LeaseKeeper
from airflow_vllm_batch.storage.memory import MemoryStore

LEASE = "_vllm_batch/1/lease.json"


@dataclass
class FakeTime:
    """Seconds of one machine. ``sleep`` lets them pass; what is due meanwhile happens."""

    seconds: float = 0.0
    every: list[tuple[float, Callable[[], Awaitable[object]]]] = field(default_factory=list)
    """What happens again and again: seconds between, and what."""

    def clock(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        before, self.seconds = self.seconds, self.seconds + seconds
        for period, act in self.every:
            for _ in range(int(self.seconds // period) - int(before // period)):
                await act()
        await asyncio.sleep(0)


class FlakyStore(MemoryStore):
    """A store that is away while ``away`` is set, and that loses the replies of so many puts."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.lose_replies = 0
        self.puts: list[str] = []

    async def before(self, operation: str, name: str) -> None:
        if self.away:
            raise StorageError(f"{name}: the store is away")

    async def put(self, name: str, data: bytes) -> ObjectInfo:
        return self._reply(name, await super().put(name, data))

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        return self._reply(name, await super().put_new(name, data))

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        return self._reply(name, await super().put_if_match(name, data, etag))

    def _reply(self, name: str, info: ObjectInfo) -> ObjectInfo:
        self.puts.append(name)
        if self.lose_replies:
            self.lose_replies -= 1
            raise StorageError(f"{name}: the reply was lost")
        return info


class UnconditionalStore(FlakyStore):
    """A store that takes every put, whatever its condition."""

    async def put_new(self, name: str, data: bytes) -> ObjectInfo:
        return await self.put(name, data)

    async def put_if_match(self, name: str, data: bytes, etag: str) -> ObjectInfo:
        return await self.put(name, data)


def keeper(
    store: Store,
    time: FakeTime,
    attempt: int = 1,
    *,
    conditional: bool = True,
    gone: Callable[[str | None], bool] = lambda process: False,
    name: str = LEASE,
) -> LeaseKeeper:
    """Return a writer that lives as long as the test, whatever this process is."""
    return LeaseKeeper(
        store,
        name,
        run_key="a-run",
        generation=1,
        attempt=attempt,
        lease_seconds=60.0,
        conditional=conditional,
        clock=time.clock,
        now=lambda: datetime(2026, 1, 2, tzinfo=UTC),
        sleep=time.sleep,
        holder_is_gone=gone,
    )
