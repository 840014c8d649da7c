"""Progress in one line for people, the same in a task's log, on a terminal and in ``status``. Pure."""

from __future__ import annotations

from datetime import datetime

from airflow_vllm_batch.contract.progress import Phase, Progress
from airflow_vllm_batch.contract.rows import Outcome


def progress_line(progress: Progress, *, now: datetime) -> str:
    """Say in one plain line where the run is: phase, rows done, rate, time left, failures."""
    parts = [str(progress.phase.value)]
    if progress.rows:
        parts.append(f"{progress.rows_done:,} of {progress.rows:,} rows ({progress.rows_done / progress.rows:.1%})")
    elif progress.rows_done:
        parts.append(f"{progress.rows_done:,} rows")
    if progress.phase is Phase.RUNNING:
        if progress.rows_per_second is not None:
            parts.append(f"{progress.rows_per_second:,.1f} rows/s")
        if progress.tokens_per_second is not None:
            parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
        if progress.seconds_left is not None:
            parts.append(f"{duration(progress.seconds_left)} left")
    elif progress.phase is not Phase.DONE:
        parts.append(f"for {duration((now - progress.phase_since).total_seconds())}")
    parts.extend(
        f"{count:,} {outcome.value}"
        for outcome, count in progress.by_outcome.items()
        if count and outcome is not Outcome.SUCCEEDED
    )
    if progress.rows_reused:
        parts.append(f"{progress.rows_reused:,} from earlier tries")
    if progress.engine_restarts:
        parts.append(f"{progress.engine_restarts} engine restarts")
    line = ", ".join(parts)
    return f"{line}; {progress.last_event}" if progress.last_event else line


def duration(seconds: float) -> str:
    """Return seconds in the two largest units: ``45 s``, ``12 min 5 s``, ``3 h 20 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
