"""What a waiting task does next and what it says meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_vllm_batch.contract import Progress
from airflow_vllm_batch.contract.progress_line import duration, progress_line
from airflow_vllm_batch.watching import Step, look, progress_document
from airflow_vllm_batch.workers.base import EndKind, WorkerEnd

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def progress(**changes: Any) -> Progress:
    fields: dict[str, Any] = {
        "run_key": "k",
        "generation": 1,
        "attempt": 2,
        "phase": "running",
        "phase_since": NOW - timedelta(seconds=90),
        "started_at": NOW - timedelta(seconds=100),
        "updated_at": NOW,
    }
    return Progress.model_validate({**fields, **changes})


def test_a_running_batch_is_waited_for_and_spoken_of() -> None:
    seen = look(None, progress(rows=10, rows_done=3), attempt=2, before=None, now=NOW)
    assert seen.step is Step.WAIT
    assert seen.line == "running, 3 of 10 rows (30.0%)"
    assert seen.document is not None
    assert seen.document["rows_done"] == 3


def test_what_did_not_move_is_not_said_again_until_a_minute_is_over() -> None:
    first = look(None, progress(rows_done=3), attempt=2, before=None, now=NOW)
    second = look(None, progress(rows_done=3), attempt=2, before=first, now=NOW + timedelta(seconds=10))
    assert second.line is None
    assert second.document is None
    third = look(None, progress(rows_done=3), attempt=2, before=second, now=NOW + timedelta(seconds=61))
    assert third.line == "running, 3 rows"


def test_what_moved_is_said_at_once() -> None:
    first = look(None, progress(rows_done=3), attempt=2, before=None, now=NOW)
    assert look(None, progress(rows_done=4), attempt=2, before=first, now=NOW).line == "running, 4 rows"
    assert look(None, progress(rows_done=3, phase="merging"), attempt=2, before=first, now=NOW).line is not None


def test_the_progress_of_an_earlier_try_says_nothing_about_this_one() -> None:
    assert look(None, progress(attempt=1, rows_done=9), attempt=2, before=None, now=NOW).line is None
    assert look(None, None, attempt=2, before=None, now=NOW).line is None


def test_a_worker_that_ended_is_read() -> None:
    ended = WorkerEnd(EndKind.EXITED, 0, "done")
    assert look(ended, progress(), attempt=2, before=None, now=NOW).step is Step.FINISH


def test_a_line_has_rate_time_left_and_failures() -> None:
    line = progress_line(
        progress(
            rows=12_000,
            rows_done=1_200,
            rows_per_second=35.21,
            tokens_per_second=12_345.6,
            seconds_left=305,
            by_outcome={"succeeded": 1_100, "failed": 60, "invalid": 40},
            rows_reused=500,
            engine_restarts=1,
            last_event="engine restarted",
        ),
        now=NOW,
    )
    assert line == (
        "running, 1,200 of 12,000 rows (10.0%), 35.2 rows/s, 12,346 tokens/s, 5 min 5 s left, 60 failed, 40 invalid, "
        "500 from earlier tries, 1 engine restarts; engine restarted"
    )


def test_a_phase_without_rows_says_how_long_it_lasts() -> None:
    assert progress_line(progress(phase="loading"), now=NOW) == "loading, for 1 min 30 s"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (125, "2 min 5 s"), (3600, "1 h"), (7_260, "2 h 1 min")],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_document_has_no_more_of_an_error_than_its_head() -> None:
    groups = [{"code": "timeout", "message": "x" * 1000, "count": 2, "custom_ids": ["secret-id"]}]
    document = progress_document(progress(error_groups=groups))
    assert document["error_groups"] == [{"code": "timeout", "message": "x" * 200, "count": 2}]
