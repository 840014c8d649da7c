"""Wait out a storage that is away: a write is tried again, with back-off and jitter, until it works or time is up."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from airflow_vllm_batch.storage.base import (
    ObjectChangedError,
    ObjectExistsError,
    StorageError,
    StorageRefusedError,
)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Patience:
    """How long to wait for storage.

    :param seconds: from the first failure in a row.
    :param refused_seconds: likewise, where storage answers and says no: long enough for a credentials file to be
        renewed, since everything could be written when the run began.
    :param clock: monotonic seconds.
    """

    seconds: float = 1800.0
    refused_seconds: float = 300.0
    first_delay_seconds: float = 1.0
    max_delay_seconds: float = 30.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random

    async def keep_trying(
        self, act: Callable[[], Awaitable[ResultT]], *, on_failure: Callable[[StorageError], None] = lambda error: None
    ) -> ResultT:
        """Return what ``act`` returns once it works.

        :param on_failure: told of each failure after which it is tried again.
        :raises StorageError: the last one, when time is up; a condition that does not hold, at once.
        """
        failures = 0
        since: float | None = None
        refused_since: float | None = None
        while True:
            try:
                return await act()
            except (ObjectExistsError, ObjectChangedError):
                raise
            except StorageError as error:
                now = self.clock()
                since = now if since is None else since
                refused = isinstance(error, StorageRefusedError)
                refused_since = None if not refused else now if refused_since is None else refused_since
                if refused_since is not None and now - refused_since >= min(self.refused_seconds, self.seconds):
                    raise
                if now - since >= self.seconds:
                    raise StorageError(f"storage was away for {now - since:.0f} s: {error}") from error
                on_failure(error)
                failures += 1
                longest = min(self.max_delay_seconds, self.first_delay_seconds * 2.0 ** min(failures - 1, 20))
                await self.sleep(longest * (0.5 + 0.5 * self.jitter()))
