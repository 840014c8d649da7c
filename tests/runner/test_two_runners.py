"""Real processes on one folder: one works and the other waits, the frozen one is fenced, the killed one is followed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment
from tests.support.dying_runner import MOMENTS
from tests.support.runner_process import ProcessRun, end_now, end_of, freeze


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    end_now(*started)


def test_the_second_runner_waits_for_the_first_and_then_finds_nothing_to_run(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    run = ProcessRun(tmp_path)
    processes.append(run.start())
    run.wait_for_segments(1)
    processes.append(run.start())
    assert [end_of(process)[0] for process in processes] == [0, 0]
    assert run.answered == run.ids
    assert (run.attempt(1)["rows_reused"], run.attempt(2)["rows_reused"]) == (0, 40)
    assert {path.name[:2] for path in run.segments()} == {"01"}
    assert run.lease().released_at is not None


def test_a_runner_that_was_frozen_writes_nothing_after_it_was_taken_over(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    run = ProcessRun(tmp_path, rows=16, delay_seconds=0.3, lease_seconds=2.0)
    first = run.start()
    processes.append(first)
    run.wait_for_segments(2)
    freeze(first)  # the next put is a second away: what is under way in a frozen process can't be called back
    kept = run.rows_kept()
    second = run.start()
    processes.append(second)
    code, said = end_of(second)
    assert code == 0, said
    before = run.everything()
    first.send_signal(signal.SIGCONT)
    code, said = end_of(first)
    assert code == 73, said
    after = run.everything()
    assert {name for name in after if after[name] != before.get(name)} == {
        "_vllm_batch/1/attempts/01.json",
        "_vllm_batch/1/attempts/01.log.zst",
    }
    assert set(before) <= set(after)
    record = run.attempt(1)
    assert (record["exit_code"], record["final"]) == (73, False)
    assert record["reason"].startswith("the run was taken over by attempt 2 on ")
    assert (run.manifest["attempt"], run.manifest["rows_reused"]) == (2, kept)
    assert run.answered == run.ids


def test_a_stop_ends_the_waiting_at_once(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    run = ProcessRun(tmp_path, lease_seconds=3600.0)
    first = run.start()
    processes.append(first)
    run.wait_for_segments(1)
    freeze(first)
    second = run.start()
    processes.append(second)
    run.wait_for_attempt(2, "waiting for the lease of attempt 1 on ")
    second.send_signal(signal.SIGTERM)
    code, said = end_of(second)
    assert code == 75, said
    record = run.attempt(2)
    assert record["reason"].startswith("stopped while waiting for the lease of attempt 1 on ")
    assert (record["phase"], run.lease().attempt) == ("queued", 1)


def test_a_runner_that_was_killed_is_followed_without_a_wait_and_its_record_is_completed(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    run = ProcessRun(tmp_path, lease_seconds=3600.0)
    first = run.start()
    processes.append(first)
    run.wait_for_segments(2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(timeout=30)
    kept = run.rows_kept()
    second = run.start()
    processes.append(second)
    code, said = end_of(second)
    assert code == 0, said
    assert (run.manifest["rows_reused"], run.answered) == (kept, run.ids)
    record = run.attempt(1)
    assert (record["exit_code"], record["final"]) == (None, False)
    assert record["reason"] == "ended without a word; found by a later try"
    assert record["ended_at"] is not None


def test_somebody_at_the_command_line_is_told_who_holds_the_run(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    run = ProcessRun(tmp_path, rows=400, lease_seconds=2.0)
    processes.append(run.start())
    run.wait_for_segments(1)
    script = (
        "import sys, pathlib;"
        "from airflow_vllm_batch.contract import BatchSpec;"
        "from airflow_vllm_batch.runner.process import run_spec;"
        "from airflow_vllm_batch.runner.signals import StopSignal;"
        "from airflow_vllm_batch.storage.access import Access;"
        "spec = BatchSpec.read(pathlib.Path(sys.argv[1]).read_bytes(), 'spec');"
        "sys.exit(run_spec(spec, Access.ambient(), StopSignal(), started_by='cli').exit_code)"
    )
    second = subprocess.run(
        [sys.executable, "-c", script, f"{tmp_path}/spec.json"],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert second.returncode == 73, second.stderr
    assert run.attempt(2)["reason"].startswith("held by attempt 1 on ")
    assert processes[0].poll() is None


@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_a_runner_is_killed_the_same_command_ends_the_run_with_every_row_once(
    tmp_path: Path, processes: list[subprocess.Popen[str]], moment: str
) -> None:
    run = ProcessRun(tmp_path, rows=16, delay_seconds=0.0, lease_seconds=3600.0)
    dying = run.start("--dies-at", moment, module="tests.support.dying_runner")
    processes.append(dying)
    code, said = end_of(dying)
    assert code == -signal.SIGKILL, said
    kept = run.rows_kept()
    again = run.start()
    processes.append(again)
    code, said = end_of(again)
    assert code == 0, said
    assert (run.answered, run.manifest["rows_reused"], run.manifest["attempt"]) == (run.ids, kept, 2)
    expected = {"staging": 0, "engine load": 0, "first row": 0, "before a segment": 8, "after a segment": 12}
    assert kept in (range(expected[moment], 17) if moment in expected else {16})
    assert ("engine ready" in said) == (kept < 16)


def test_a_full_local_disk_loses_nothing(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    run = ProcessRun(tmp_path)
    first = run.start()
    processes.append(first)
    run.wait_for_segments(1)
    # As a full disk does it: no file of this process grows beyond what the rows of some seconds take.
    resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (12_000, 12_000))
    code, said = end_of(first)
    assert code == 74, said
    record = run.attempt(1)
    assert record["reason"].startswith("the local disk failed: ")
    assert record["by_outcome"]["succeeded"] == run.rows_kept()
    second = run.start()
    processes.append(second)
    code, said = end_of(second)
    assert code == 0, said
    assert (run.answered, run.manifest["rows_reused"]) == (run.ids, record["by_outcome"]["succeeded"])
