"""One try of a task, with a runner that is a coroutine: what is started, what is said, what is left behind."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench import RUN_KEY, Bench, exits, succeeds, until_stopped  # isort: skip  before Airflow
from tests.support.task import chat_row  # isort: skip

from airflow_vllm_batch.contract import AttemptRecord, InputFile, Progress
from airflow_vllm_batch.exceptions import (
    BatchStoppedError,
    ConnectionUnusableError,
    VLLMBatchFailedError,
)
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import S3Settings, StoreFile
from airflow_vllm_batch.workers.base import WorkerUnusableError
from tests.support.fake_worker import FakeRun, FakeWorker


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# A try that goes well


async def test_a_batch_that_passes_returns_what_goes_to_xcom(bench: Bench) -> None:
    document = await bench.run()
    assert document["verdict"] == "pass"
    assert document["counts"]["succeeded"] == 3
    assert document["output_uri"] == f"{bench.output}/output.jsonl"
    assert bench.lines == ["fake runner started"]
    assert bench.worker.runs[0].closed


async def test_the_runner_gets_the_attempt_the_generation_and_the_pinned_input(bench: Bench) -> None:
    await bench.run()
    spec = await bench.worker.runs[0].spec()
    assert (spec.generation, spec.attempt, spec.labels["preflight"]) == (1, 1, "full")
    assert spec.inputs[0].etag is not None
    assert spec.inputs[0].size == bench.input.stat().st_size


async def test_the_attempt_that_the_runner_left_open_is_completed(bench: Bench) -> None:
    await bench.fails(script=exits(-9))
    record = await bench.attempt(1)
    assert (record.exit_code, record.final, record.worker) == (-9, False, "fake")


async def test_what_the_runner_recorded_itself_is_kept_and_quoted(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await (await run.folder()).complete_attempt(
            1, ended_at=datetime.now(UTC), exit_code=75, reason="the GPU is held by another process", final=False
        )
        return 75

    error = await bench.fails(script=script)
    assert str(error).startswith("the GPU is held by another process (exit code 75 (resumable)). Attempt 1 of ")
    assert "a retry runs only the rows without a result" in str(error)


async def test_an_earlier_attempt_that_died_without_a_word_is_completed_by_the_next(bench: Bench) -> None:
    folder = bench.folder
    await bench.fails(script=exits(-9))
    await folder.start_attempt(
        lambda number: AttemptRecord(
            run_key=RUN_KEY, generation=1, number=number, started_by="operator", started_at=datetime.now(UTC)
        )
    )
    await bench.run(script=succeeds)
    record = await bench.attempt(2)
    assert record.reason == "ended without a word; found by a later try"
    assert (await bench.attempt(3)).exit_code == 0


# How a try ends


@pytest.mark.parametrize("code", [64, 65, 78])
async def test_an_end_that_a_retry_can_not_change_is_not_retried(bench: Bench, code: int) -> None:
    error = await bench.fails(script=exits(code))
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == code


@pytest.mark.parametrize("code", [69, 70, 73, 74, 75, 1, -9, -11])
async def test_any_other_end_is_retried(bench: Bench, code: int) -> None:
    error = await bench.fails(script=exits(code))
    assert not isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == code


async def test_a_failure_pushes_each_value_and_the_whole(bench: Bench) -> None:
    await bench.fails(script=exits(75))
    assert bench.published["state"] == "failed"
    assert bench.published["verdict"] is None
    assert bench.published["errors_uri"] == f"{bench.output}/errors.jsonl"
    whole = bench.published["return_value"]
    assert all(bench.published[key] == value for key, value in whole.items())


async def test_too_many_failed_rows_fail_the_task_after_everything_is_written(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 2, "invalid": 1})
        return 3

    error = await bench.fails(script=script)
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 3
    assert str(error).startswith("1 of 3 rows failed, 0 allowed")
    assert bench.published["verdict"] == "fail"
    assert bench.published["counts"]["invalid"] == 1
    assert Path(bench.published["errors_uri"]).exists()


async def test_failed_rows_that_could_heal_are_worth_a_retry(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 2, "failed": 1}, healable_rows=1)
        return 3

    error = await bench.fails(script=script)
    assert not isinstance(error, VLLMBatchFailedError)


async def test_a_passing_exit_code_without_a_manifest_is_no_success(bench: Bench) -> None:
    error = await bench.fails(script=exits(0))
    assert not isinstance(error, VLLMBatchFailedError)
    assert "manifest.json and its outputs do not say so" in str(error)


async def test_a_passing_exit_code_with_the_manifest_of_another_attempt_is_no_success(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 3}, attempt=7)
        return 0

    assert "do not say so" in str(await bench.fails(script=script))


async def test_a_file_without_a_line_that_can_run_is_final_and_has_its_counts(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"invalid": 3})
        return 65

    error = await bench.fails(script=script)
    assert isinstance(error, VLLMBatchFailedError)
    assert bench.published["counts"]["invalid"] == 3


@pytest.fixture
def _records_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def complete_attempt(self: RunFolder, number: int, shard: int | None = None, **changes: Any) -> None:
        raise StorageError("the store is away")

    monkeypatch.setattr(RunFolder, "complete_attempt", complete_attempt)


@pytest.mark.usefixtures("_records_fail")
async def test_a_record_that_can_not_be_written_changes_no_verdict_and_hides_no_cause(bench: Bench) -> None:
    error = await bench.fails(script=exits(78))
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 78
    assert (await bench.run(script=succeeds))["verdict"] == "pass"
    bench.input.write_text("nonsense\n")
    error = await bench.fails()
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 65


# A run that is done


async def test_a_finished_run_is_returned_without_starting_anything(bench: Bench) -> None:
    first = await bench.run()
    assert await bench.run(script=exits(70)) == first
    assert len(bench.worker.runs) == 1
    assert await bench.folder.attempt_numbers() == [1]


async def test_a_replaced_input_runs_again(bench: Bench) -> None:
    await bench.run()
    bench.input.write_text(json.dumps(chat_row("other")) + "\n")
    await bench.run()
    assert len(bench.worker.runs) == 2


async def test_a_missing_input_does_not_undo_a_finished_run(bench: Bench) -> None:
    first = await bench.run()
    bench.input.unlink()
    assert await bench.run() == first


async def test_another_threshold_judges_a_failed_run_again_and_records_it(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 2, "invalid": 1})
        return 3

    await bench.fails(script=script)
    document = await bench.run(allowed_failures=0.34)
    assert document["verdict"] == "pass"
    assert len(bench.worker.runs) == 1
    manifest = await bench.folder.read_done_manifest()
    assert manifest is not None
    assert manifest.verdict.passed
    assert manifest.verdict.earlier[0].allowed_failures == 0


async def test_outputs_that_were_changed_since_are_written_again(bench: Bench) -> None:
    await bench.run()
    (bench.output / "output.jsonl").write_bytes(b"{}\n{}\n")
    await bench.run()
    assert len(bench.worker.runs) == 2


async def test_a_restart_begins_anew_once_per_clear_and_not_on_a_retry(bench: Bench) -> None:
    await bench.run()
    clear = {"epoch": 1, "restart": True}
    await bench.run(plan=clear)
    assert len(bench.worker.runs) == 2
    assert (await bench.worker.runs[1].spec()).generation == 2
    await bench.run(plan=clear)
    assert len(bench.worker.runs) == 2


# Before the start


async def test_a_refusal_is_recorded_pushed_and_final(bench: Bench) -> None:
    bench.input.write_text("")
    error = await bench.fails()
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 65
    assert "is empty (0 bytes)" in str(error)
    record = await bench.attempt(1)
    assert (record.exit_code, record.final, record.phase) == (65, True, "preflight")
    assert "is empty" in (record.reason or "")
    assert bench.published["state"] == "failed"
    assert bench.worker.runs == []
    assert await bench.folder.read_spec() is None


async def test_a_missing_input_is_worth_a_retry(bench: Bench) -> None:
    bench.input.unlink()
    error = await bench.fails()
    assert not isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 69
    assert "the input does not exist" in str(error)
    assert (await bench.attempt(1)).exit_code == 69


async def test_an_interpreter_that_can_not_run_it_is_found_before_the_start(bench: Bench) -> None:
    bench.worker.problem = WorkerUnusableError("no vLLM here")
    error = await bench.fails()
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 78
    assert bench.worker.runs == []


async def test_the_folder_of_another_run_is_refused_untouched(bench: Bench) -> None:
    await bench.run(run_key="another-run")
    before = sorted(bench.output.rglob("*.json"))
    error = await bench.fails()
    assert isinstance(error, VLLMBatchFailedError)
    assert error.exit_code == 64
    assert "belongs to another run (another-run" in str(error)
    assert "{{ run_id }}" in str(error)
    assert sorted(bench.output.rglob("*.json")) == before


async def test_overwrite_takes_the_folder_over_as_a_new_generation(bench: Bench) -> None:
    await bench.run(run_key="another-run")
    await bench.run(plan={"overwrite": True})
    assert (await bench.worker.runs[1].spec()).generation == 2


async def test_an_input_that_would_be_overwritten_is_refused_before_the_folder_is_touched(bench: Bench) -> None:
    bench.output.mkdir()
    bench.input.rename(bench.output / "output.jsonl")
    error = await bench.fails(inputs=(InputFile(uri=f"{bench.output}/../out/output.jsonl"),))
    assert error.exit_code == 64
    assert "input and output are the same object" in str(error)
    assert [path.name for path in bench.output.iterdir()] == ["output.jsonl"]


async def test_a_retry_does_not_check_an_unchanged_input_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await bench.fails(script=exits(75))
    assert "input checked: 3 rows: 3 can run, 0 are bad" in caplog.text
    caplog.clear()
    await bench.run(script=succeeds)
    assert "the input is unchanged since it was checked" in caplog.text
    assert "input checked" not in caplog.text


async def test_a_retry_checks_a_changed_input(bench: Bench) -> None:
    await bench.fails(script=exits(75))
    bench.input.write_text("nonsense\n")
    assert "no line can run" in str(await bench.fails())


# While it runs


async def test_progress_is_pushed_and_logged_while_the_runner_works(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def script(run: FakeRun) -> int:
        folder = await run.folder()
        progress = Progress.model_validate(
            {
                "run_key": RUN_KEY,
                "generation": 1,
                "attempt": 1,
                "phase": "running",
                "phase_since": datetime.now(UTC),
                "started_at": datetime.now(UTC),
                "updated_at": datetime.now(UTC),
                "rows_done": 2,
            }
        )
        await folder.store.put(folder.layout.progress(), progress.to_bytes())
        while "vllm_progress" not in bench.published:
            await asyncio.sleep(0)
        return await succeeds(run)

    await bench.run(script=script)
    assert bench.published["vllm_progress"]["rows_done"] == 2
    assert "running, 2 rows" in caplog.text


async def test_credentials_are_renewed_at_half_of_their_life(bench: Bench) -> None:
    clock = datetime(2026, 1, 1, tzinfo=UTC)
    made: list[StoreFile] = []

    def store() -> StoreFile:
        keys = {"access_key_id": f"AK{len(made)}", "secret_access_key": "s", "expires_at": clock + timedelta(hours=1)}
        made.append(StoreFile(stores={"input": S3Settings.model_validate(keys)}))
        return made[-1]

    async def script(run: FakeRun) -> int:
        nonlocal clock
        clock += timedelta(minutes=29)
        await asyncio.sleep(0.05)
        assert len(run.stores) == 1
        clock += timedelta(minutes=2)
        while len(run.stores) == 1:
            await asyncio.sleep(0)
        return await succeeds(run)

    bench.now, bench.store = lambda: clock, store
    await bench.run(script=script)
    assert bench.worker.runs[0].stores == made[:2]


async def test_credentials_that_can_not_be_renewed_do_not_end_the_run(bench: Bench) -> None:
    clock = datetime(2026, 1, 1, tzinfo=UTC)
    asked = 0

    def store() -> StoreFile:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise ConnectionUnusableError("the token service is away")
        keys = {"access_key_id": "AK", "secret_access_key": "s", "expires_at": clock + timedelta(hours=1)}
        return StoreFile(stores={"input": S3Settings.model_validate(keys)})

    async def script(run: FakeRun) -> int:
        nonlocal clock
        clock += timedelta(minutes=31)
        while asked == 1:
            await asyncio.sleep(0)
        return await succeeds(run)

    bench.now, bench.store = lambda: clock, store
    assert (await bench.run(script=script))["verdict"] == "pass"


# Stopping


async def test_a_stop_ends_the_runner_and_raises_even_if_the_run_would_have_passed(bench: Bench) -> None:
    async def script(run: FakeRun) -> int:
        one_try.stop()
        await run.told_to_stop.wait()
        return await succeeds(run)

    one_try = bench.try_once(script=script)
    with pytest.raises(BatchStoppedError, match="a retry, or clearing the task, runs only the rows without a result"):
        await one_try.run()
    assert bench.worker.runs[0].told_to_stop.is_set()
    assert (await bench.attempt(1)).ended


async def test_a_stop_before_the_start_starts_nothing(bench: Bench) -> None:
    one_try = bench.try_once()
    one_try.stop()
    with pytest.raises(BatchStoppedError):
        await one_try.run()
    assert bench.worker.runs == []


async def test_a_stop_during_the_checks_starts_nothing(bench: Bench) -> None:
    class StopsWhenAsked(FakeWorker):
        async def check(self, engine: str) -> list[str]:
            one_try.stop()
            return []

    bench.worker = StopsWhenAsked(succeeds)
    one_try = bench.try_once()
    with pytest.raises(BatchStoppedError):
        await one_try.run()
    assert bench.worker.runs == []


async def test_a_timeout_of_the_task_stops_the_runner_and_passes_through(bench: Bench) -> None:
    class TimedOut(BaseException):
        """As Airflow's own, which its alarm handler raises wherever the task stands."""

    def publish(key: str, value: Any) -> None:
        raise TimedOut

    async def script(run: FakeRun) -> int:
        folder = await run.folder()
        progress = {
            "contract_version": "1.0",
            "run_key": RUN_KEY,
            "generation": 1,
            "attempt": 1,
            "phase": "running",
            **dict.fromkeys(("phase_since", "started_at", "updated_at"), datetime.now(UTC).isoformat()),
        }
        await folder.store.put(folder.layout.progress(), json.dumps(progress).encode())
        return await until_stopped(run)

    one_try = bench.try_once(script=script)
    one_try._publish = publish
    with pytest.raises(TimedOut):
        await one_try.run()
    assert bench.worker.runs[0].told_to_stop.is_set()
    assert bench.worker.runs[0].closed
