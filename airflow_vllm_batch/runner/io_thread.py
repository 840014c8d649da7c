"""An event loop in a thread of its own for storage, since a loading engine blocks the main one for minutes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

ResultT = TypeVar("ResultT")


class IoThread:
    """Use as a context manager. What it runs must not be awaited from its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="storage", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine in this loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine in this loop and await it from another one; cancellation goes through."""
        return await asyncio.wrap_future(self.submit(coroutine))


async def _cancel_all() -> None:
    """Cancel what still runs in this loop, and see it end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    # A stream that was not read to its end still holds its file or its connection.
    await asyncio.get_running_loop().shutdown_asyncgens()
