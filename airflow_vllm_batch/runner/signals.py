"""The wish to stop, heard from the first moment. Imports nothing heavy: installed before everything else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType


class Request:
    """Something that is asked for once and never taken back, in any thread, and that others wait for in theirs."""

    def __init__(self) -> None:
        self._wakers: list[Callable[[], object]] = []

    @property
    def requested(self) -> bool:
        raise NotImplementedError

    def on_request(self, waker: Callable[[], object]) -> None:
        """Call ``waker`` at the request, or now where it was made; it must be quick and thread-safe."""
        self._wakers.append(waker)
        if self.requested:
            waker()

    def _wake(self) -> None:
        for waker in list(self._wakers):
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits any more
                waker()


class StopSignal(Request):
    """The wish to stop: SIGTERM, SIGINT or the end of a parent pipe. Safe from a signal handler."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self.requested_at: float | None = None
        """Monotonic seconds."""

    @property
    def requested(self) -> bool:
        return self.requested_at is not None

    def request(self, reason: str) -> None:
        """Ask for a stop; only the first reason counts."""
        if self.requested:
            return
        self.reason = reason
        self.requested_at = time.monotonic()
        self._wake()


def install(stop: StopSignal) -> None:
    """Turn SIGTERM and SIGINT into a request. A second SIGINT is Python's own, for a person who won't wait."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request(f"received {signal.Signals(number).name}")
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def stop_at_end_of_stdin(stop: StopSignal) -> None:
    """Ask for a stop when the parent closes our stdin, as its death does too."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.request("the parent process went away")

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
