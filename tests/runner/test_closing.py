"""A run that ends early, by a cancel request or since its window closed: every row is in a file all the same."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import CancelRequest, ExitCode, Outcome
from airflow_vllm_batch.contract.manifest import ManifestState
from airflow_vllm_batch.runner.closing import CloseWatch, Closing
from airflow_vllm_batch.runner.engine.base import EngineInfo, Reply
from airflow_vllm_batch.storage.base import StorageError
from tests.support.runs import LocalRun, ScriptedEngine, answer, chat

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def ten(tmp_path: Path) -> LocalRun:
    return LocalRun(tmp_path, [*[chat(f"r{number}", f"p{number}") for number in range(10)], "{broken"])


class ClosingEngine(ScriptedEngine):
    """Answers four rows; with the fifth in flight somebody closes the run."""

    def __init__(self, closing: Closing, outcome: Outcome) -> None:
        super().__init__()
        self.closing = closing
        self.outcome = outcome

    async def send(self, endpoint: str, body: bytes) -> Reply:
        if self.asked.total() == 4:
            self.closing.request(self.outcome, f"it is {self.outcome} by the test")
            await asyncio.Event().wait()
        return await super().send(endpoint, body)


@pytest.mark.parametrize(
    ("outcome", "state", "allowed", "exit_code"),
    [
        (Outcome.CANCELLED, ManifestState.CANCELLED, 0, ExitCode.TOO_MANY_FAILED),
        (Outcome.CANCELLED, ManifestState.CANCELLED, 1.0, ExitCode.TOO_MANY_FAILED),
        (Outcome.EXPIRED, ManifestState.EXPIRED, 0, ExitCode.TOO_MANY_FAILED),
        (Outcome.EXPIRED, ManifestState.EXPIRED, 1.0, ExitCode.PASSED),
    ],
)
async def test_rows_left_get_their_outcome_and_the_files_are_complete(
    tmp_path: Path, outcome: Outcome, state: ManifestState, allowed: float, exit_code: ExitCode
) -> None:
    run, closing = ten(tmp_path), Closing()
    engine = ClosingEngine(closing, outcome)
    code, manifest = await run.run(engine, closing=closing, max_in_flight=1, allowed_failures=allowed)
    assert (code, manifest.state, engine.stops) == (exit_code, state, 1)
    assert manifest.counts.by_outcome == {Outcome.SUCCEEDED: 4, outcome: 6, Outcome.INVALID: 1}
    assert [row["custom_id"] for row in run.succeeded] == ["r0", "r1", "r2", "r3"]
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in run.failed] == [
        *[(f"r{number}", None, str(outcome)) for number in range(4, 10)],
        (None, None, "invalid_json"),
    ]
    assert run.failed[0]["error"]["message"] == f"it is {outcome} by the test"
    assert manifest.throughput is None or manifest.throughput.rows_per_second is not None
    assert manifest.healable_rows == 0


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.EXPIRED])
async def test_a_retry_keeps_such_rows_and_a_new_epoch_runs_them(tmp_path: Path, outcome: Outcome) -> None:
    run, closing = ten(tmp_path), Closing()
    await run.run(ClosingEngine(closing, outcome), closing=closing, max_in_flight=1)
    retry = ScriptedEngine()
    _, manifest = await run.run(retry)
    assert (retry.starts, manifest.rows_reused, manifest.state) == (0, 10, str(outcome))
    cleared = ScriptedEngine()
    exit_code, manifest = await run.run(cleared, epoch=1, allowed_failures=1)
    assert (exit_code, manifest.state) == (ExitCode.PASSED, ManifestState.COMPLETED)
    assert dict(cleared.asked) == {f"p{number}": 1 for number in range(4, 10)}


async def test_a_run_that_is_closed_before_its_engine_starts_never_starts_it(tmp_path: Path) -> None:
    run, closing, engine = ten(tmp_path), Closing(), ScriptedEngine()
    closing.request(Outcome.EXPIRED, "too late")
    _, manifest = await run.run(engine, closing=closing)
    assert engine.starts == 0
    assert manifest.counts.by_outcome == {Outcome.EXPIRED: 10, Outcome.INVALID: 1}


async def test_a_run_that_is_closed_while_its_engine_starts_does_not_wait_for_it(tmp_path: Path) -> None:
    closing = Closing()

    class Slow(ScriptedEngine):
        async def start(self) -> EngineInfo:
            closing.request(Outcome.CANCELLED, "not needed any more")
            await asyncio.Event().wait()
            raise AssertionError

    run = ten(tmp_path)
    code, manifest = await run.run(Slow(), closing=closing)
    assert (code, manifest.state) == (ExitCode.TOO_MANY_FAILED, ManifestState.CANCELLED)


async def test_a_run_that_is_closed_when_nothing_is_left_is_a_completed_one(tmp_path: Path) -> None:
    run, closing = ten(tmp_path), Closing()

    def script(text: str, before: int) -> Reply:
        if text == "p9":
            closing.request(Outcome.CANCELLED, "too late")
        return Reply(200, answer(text))

    _, manifest = await run.run(ScriptedEngine(script), closing=closing, max_in_flight=1)
    assert (manifest.state, len(run.succeeded)) == (ManifestState.COMPLETED, 10)


# Looking for reasons


def request(attempt: int) -> CancelRequest:
    return CancelRequest(attempt=attempt, requested_at=NOW, requested_by="ann on desk", reason="wrong model")


def test_a_cancel_request_is_for_one_attempt_only() -> None:
    closing = Closing()
    watch = CloseWatch(closing, attempt=3)
    watch.look(lambda: request(2))
    watch.look(lambda: None)
    assert not closing.requested
    watch.look(lambda: request(3))
    assert (closing.outcome, closing.message) == (Outcome.CANCELLED, "cancelled by ann on desk: wrong model")


@pytest.mark.parametrize("error", [StorageError("away"), TimeoutError(), ValueError("no such document")])
def test_a_request_that_can_not_be_read_says_nothing(error: Exception) -> None:
    closing = Closing()

    def read() -> CancelRequest | None:
        raise error

    CloseWatch(closing, attempt=3).look(read)
    assert not closing.requested


def test_the_window_counts_from_the_first_try_of_the_epoch() -> None:
    closing, seconds = Closing(), [1000.0]
    watch = CloseWatch(closing, attempt=2, clock=lambda: seconds[0])
    watch.open_window(3600.0, began_at=NOW - timedelta(seconds=3000), now=NOW)
    seconds[0] = 1599.0
    watch.look(lambda: None)
    assert not closing.requested
    seconds[0] = 1600.0
    watch.look(lambda: None)
    assert closing.outcome is Outcome.EXPIRED
    assert closing.message == "the completion window of 3600 s closed before the row was answered"


def test_only_the_first_reason_counts() -> None:
    closing = Closing()
    closing.request(Outcome.EXPIRED, "first")
    closing.request(Outcome.CANCELLED, "second")
    assert (closing.outcome, closing.message) == (Outcome.EXPIRED, "first")
