"""Wait for something in another process, by asking again and again until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(ask: Callable[[], Found | None], *, seconds: float, what: str, pause_seconds: float = 0.25) -> Found:
    """Return the first answer of ``ask`` that is neither null nor false.

    :param what: completes "waited 60 s for …".
    :raises TimeoutError: where no such answer came in time.
    """
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause_seconds)
    return answer
