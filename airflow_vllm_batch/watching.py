"""What a waiting task does next and what it says meanwhile. Pure: a worker and a triggerer share it.

Time, the runner's state and what was said before come in as arguments; who calls decides how to sleep.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple

from airflow_vllm_batch.contract import Progress
from airflow_vllm_batch.contract.progress_line import progress_line
from airflow_vllm_batch.workers.base import WorkerEnd

QUIET_SECONDS = 60.0
"""A line at least this often, so that a log that stands still is a task that stands still."""


class Step(Enum):
    WAIT = "wait"
    FINISH = "finish"
    """The worker ended: read what it left."""


class Look(NamedTuple):
    """What one look at a running batch leads to."""

    step: Step
    line: str | None
    """For the task's log; null where nothing new is to be said."""
    document: dict[str, Any] | None
    """For the XCom ``vllm_progress``; goes with the line."""
    seen: Progress | None
    """What the line spoke of, for the next look."""
    said_at: datetime | None


def look(
    end: WorkerEnd | None,
    progress: Progress | None,
    *,
    attempt: int,
    before: Look | None,
    now: datetime,
) -> Look:
    """Decide on one look.

    :param end: how the worker ended; null while it runs.
    :param progress: what the runner last said; that of another attempt says nothing about this one.
    :param before: the look before this one.
    """
    if end is not None:
        return Look(Step.FINISH, None, None, progress, now)
    current = progress if progress is not None and progress.attempt == attempt else None
    seen, said_at = (before.seen, before.said_at) if before else (None, None)
    quiet_for = now - said_at if said_at else timedelta.max
    if current is None or (not _moved(seen, current) and quiet_for < timedelta(seconds=QUIET_SECONDS)):
        return Look(Step.WAIT, None, None, seen, said_at)
    return Look(Step.WAIT, progress_line(current, now=now), progress_document(current), current, now)


def _moved(seen: Progress | None, current: Progress) -> bool:
    if seen is None:
        return True
    return (seen.phase, seen.rows_done, seen.last_event) != (current.phase, current.rows_done, current.last_event)


def progress_document(progress: Progress) -> dict[str, Any]:
    """Return the XCom ``vllm_progress``: small, JSON, without rows or secrets."""
    return {
        "phase": progress.phase.value,
        "since": progress.phase_since.isoformat(),
        "updated_at": progress.updated_at.isoformat(),
        "last_event": progress.last_event,
        "attempt": progress.attempt,
        "rows": progress.rows,
        "rows_done": progress.rows_done,
        "rows_reused": progress.rows_reused,
        "rows_in_flight": progress.rows_in_flight,
        "by_outcome": {outcome.value: count for outcome, count in progress.by_outcome.items()},
        "rows_per_second": progress.rows_per_second,
        "tokens_per_second": progress.tokens_per_second,
        "seconds_left": progress.seconds_left,
        "engine_restarts": progress.engine_restarts,
        "error_groups": [
            {"code": group.code, "message": group.message[:200], "count": group.count}
            for group in progress.error_groups[:5]
        ],
    }
