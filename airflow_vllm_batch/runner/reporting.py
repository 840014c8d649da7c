"""The heartbeat: progress to storage and a line to the log, from a thread of its own, whatever the run is doing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from airflow_vllm_batch.contract import Phase, Progress
from airflow_vllm_batch.contract.progress_line import progress_line
from airflow_vllm_batch.runner.run_state import RunState

log = logging.getLogger(__name__)

BEAT_SECONDS = 3.0
LINE_SECONDS = 10.0


class Display(Protocol):
    """Shows progress to whoever watches this process."""

    def show(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class LineDisplay:
    """One plain line per interval and one at each change of phase.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], every_seconds: float = LINE_SECONDS) -> None:
        self._clock = clock
        self._every_seconds = every_seconds
        self._phase: Phase | None = None
        self._shown_at = float("-inf")

    def show(self, progress: Progress) -> None:
        now = self._clock()
        if progress.phase is self._phase and now - self._shown_at < self._every_seconds:
            return
        self._phase, self._shown_at = progress.phase, now
        log.info("%s", progress_line(progress, now=progress.updated_at))

    def close(self) -> None:
        return None


class BarDisplay:
    """One line that is drawn over and over, for a terminal.

    :param terminal: file descriptor of the terminal; log lines go elsewhere or scroll above it.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def show(self, progress: Progress) -> None:
        width = 30
        share = progress.rows_done / progress.rows if progress.rows else 0.0
        bar = "█" * round(share * width) + "░" * (width - round(share * width))
        self._write(f"\r\x1b[K{bar} {progress_line(progress, now=progress.updated_at)}")

    def close(self) -> None:
        self._write("\n")

    def _write(self, text: str) -> None:
        os.write(self._terminal, text.encode())


class Heartbeat:
    """Beats every three seconds from the first moment on. Use as a context manager.

    A put that fails is said once and never ends the run: progress may be stale, the manifest may not.

    :param put: replaces the progress object; called in the heartbeat's own thread.
    :param on_beat: called at each beat, such as to look for a cancel request or a stop that hangs.
    """

    def __init__(
        self,
        state: RunState,
        put: Callable[[bytes], object],
        display: Display,
        *,
        every_seconds: float = BEAT_SECONDS,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._put = put
        self._display = display
        self._every_seconds = every_seconds
        self._on_beat = on_beat
        self._ended = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._beat_until_ended, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30.0)
        self._display.close()

    def _beat_until_ended(self) -> None:
        while True:
            ended = self._ended.is_set()
            self._state.sample()
            progress = self._state.progress()
            self._display.show(progress)
            try:
                self._put(progress.to_bytes())
            except OSError as error:
                if not self._complained:
                    log.warning("progress can't be written; the run goes on without it: %s", error)
                self._complained = True
            if ended:
                return
            self._on_beat()
            self._ended.wait(self._every_seconds)


def choose_display(terminal: int, clock: Callable[[], float]) -> Display:
    """Return a bar where a person looks at a terminal, plain lines elsewhere."""
    if os.isatty(terminal):
        return BarDisplay(terminal)
    return LineDisplay(clock)
