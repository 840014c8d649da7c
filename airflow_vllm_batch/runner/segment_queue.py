"""Finished rows on their way to storage: ranges of the local result file, put one after the other, in order.

While storage is away they wait on the local disk. Nothing here knows what a row is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.segments import Range
from airflow_vllm_batch.storage.base import ObjectExistsError, StorageError, Store
from airflow_vllm_batch.storage.lease import LeaseLostError

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 32 * 1024 * 1024
"""Before compression, which happens in memory."""

Submit = Callable[[Coroutine[Any, Any, None]], "Future[None]"]
Guard = Callable[[], Awaitable[None]]
"""Returns where this runner may write now; raises ``LeaseLostError`` where it may not any more."""


class SegmentQueue:
    """Takes ranges from the engine's thread and puts them from the storage thread.

    :param submit: runs a coroutine in the loop that owns ``store``.
    :param name_of: name of the segment with a number; numbers count up from 1.
    :param pack: a range to the bytes of its object, always the same ones for the same range.
    :param on_durable: told how many rows are in storage now, besides those before.
    :param note: told in a few words what happened.
    """

    def __init__(
        self,
        store: Store,
        submit: Submit,
        *,
        name_of: Callable[[int], str],
        pack: Callable[[Range], bytes],
        patience: Patience,
        may_write: Guard,
        on_durable: Callable[[int], None],
        note: Callable[[str], None] = lambda event: None,
    ) -> None:
        self._store = store
        self._submit = submit
        self._name_of = name_of
        self._pack = pack
        self._patience = patience
        self._may_write = may_write
        self._on_durable = on_durable
        self._note = note
        self._lock = threading.Lock()  # a range is either seen by the running put loop, or starts one
        self._ranges: deque[Range] = deque()
        self._running: Future[None] | None = None
        self._idle = True
        self._waiting_bytes = 0
        self._failing = False
        self._catching_up = False
        self.sequence = 0
        """Number of the last segment that was named; set before the first range comes."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of finished rows that are not in storage yet."""
        return self._waiting_bytes

    @property
    def failing(self) -> bool:
        """Whether storage is away now."""
        return self._failing

    def add(self, closed: Range) -> None:
        """Take a range. Returns at once."""
        with self._lock:
            self._ranges.append(closed)
            self._waiting_bytes += closed.size
            if self._idle:
                self._idle = False
                self._running = self._submit(self._put_all())

    def raise_failure(self) -> None:
        """Raise what ended the puts, if anything did."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def drain(self) -> None:
        """Wait until everything is in storage, and raise what a put raised. Cancelling it cancels no put."""
        if self._running is not None:
            await asyncio.shield(asyncio.wrap_future(self._running))

    async def _put_all(self) -> None:
        while (closed := self._next()) is not None:
            await self._put(closed)

    def _next(self) -> Range | None:
        """Take the next range; after an outage with its neighbours, or thousands of small objects would follow."""
        with self._lock:
            if not self._ranges:
                self._idle, self._catching_up = True, False
                return None
            closed = self._ranges.popleft()
            while self._catching_up and self._ranges and closed.joins(self._ranges[0], MAX_SEGMENT_BYTES):
                following = self._ranges.popleft()
                closed = Range(closed.start, following.end, closed.rows + following.rows)
            return closed

    async def _put(self, closed: Range) -> None:
        self.sequence += 1
        name = self._name_of(self.sequence)
        packed = await asyncio.to_thread(self._pack, closed)

        async def put() -> None:
            await self._may_write()
            # The same name and bytes each time: an earlier put may have arrived although its reply did not.
            await self._store.put_new(name, packed)

        try:
            await self._patience.keep_trying(put, on_failure=self._say_failure)
        except ObjectExistsError as error:
            raise LeaseLostError(f"another runner writes under the same attempt: {error}") from error
        # A crash here leaves a segment that progress does not mention; the next try lists segments and reuses its rows.
        with self._lock:
            self._waiting_bytes -= closed.size
        self._on_durable(closed.rows)
        if self._failing:
            self._failing, self._catching_up = False, True
            self._note("storage is back")
            log.info("storage is back: finished rows are put again")

    def _say_failure(self, error: StorageError) -> None:
        if not self._failing:
            log.warning("storage is away, finished rows wait on the local disk: %s", error)
            self._note(f"storage is away, finished rows wait on the local disk: {error}"[:500])
        self._failing = True
