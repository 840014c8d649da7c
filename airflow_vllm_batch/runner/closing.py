"""End a run early, in order: rows in flight are aborted, rows left get an outcome that is not theirs to blame.

A cancel request and a completion window that closes are the same thing with two names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime

from airflow_vllm_batch.contract import CancelRequest, ErrorCode, Outcome
from airflow_vllm_batch.runner.results import Finished, Job
from airflow_vllm_batch.runner.signals import Request

log = logging.getLogger(__name__)

_CODES = {Outcome.EXPIRED: ErrorCode.EXPIRED, Outcome.CANCELLED: ErrorCode.CANCELLED}


class Closing(Request):
    """The wish to close the run early. Safe from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: Outcome | None = None
        self.message = ""

    @property
    def requested(self) -> bool:
        return self.outcome is not None

    def request(self, outcome: Outcome, message: str) -> None:
        """Ask for the end; only the first request counts.

        :param outcome: ``expired`` or ``cancelled``, of every row without a result.
        :param message: why, in the error of each of these rows.
        """
        if self.requested:
            return
        log.warning("the run is closed early: %s", message)
        self.message = message
        self.outcome = outcome
        self._wake()

    def end_of(self, job: Job) -> Finished:
        """Return the end of a row that will not be answered."""
        if self.outcome is None:
            raise RuntimeError("nobody asked for an early end")
        return Finished(job, self.outcome, 0, _CODES[self.outcome], self.message, None, None)


class CloseWatch:
    """Looks for reasons to close a run; asked every few seconds, from one thread.

    :param clock: monotonic seconds.
    """

    def __init__(self, closing: Closing, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._closing = closing
        self._attempt = attempt
        self._clock = clock
        self._window_seconds = 0.0
        self._deadline: float | None = None
        self._ignored: CancelRequest | None = None

    def open_window(self, seconds: float, *, began_at: datetime, now: datetime) -> None:
        """Start to count a completion window that began with the first try of the epoch; it may have closed already."""
        self._window_seconds = seconds
        self._deadline = self._clock() + seconds - (now - began_at).total_seconds()
        self._look_at_clock()

    def look(self, read_cancel: Callable[[], CancelRequest | None]) -> None:
        """Request the end where its time has come.

        :param read_cancel: reads cancel.json; may raise ``OSError`` or ``ValueError``, which says nothing.
        """
        self._look_at_clock()
        if self._closing.requested:
            return
        try:
            request = read_cancel()
        except (OSError, ValueError):
            return
        if request is None:
            return
        if request.attempt == self._attempt:
            why = f": {request.reason}" if request.reason else ""
            self._closing.request(Outcome.CANCELLED, f"cancelled by {request.requested_by}{why}")
        elif request != self._ignored:
            self._ignored = request
            log.info("a cancel request for attempt %d is not for this one", request.attempt)

    def _look_at_clock(self) -> None:
        if self._deadline is not None and self._clock() >= self._deadline:
            self._closing.request(
                Outcome.EXPIRED,
                f"the completion window of {self._window_seconds:g} s closed before the row was answered",
            )
