"""The runner as a process: signals, a parent that goes away, sudden death, and what is left for the next try."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import zstandard

from airflow_vllm_batch.contract import BatchSpec, InputFile, ModelSpec, OutputTarget
from airflow_vllm_batch.contract.spec import EngineSpec, Limits
from airflow_vllm_batch.storage.settings import StoreFile, write_store_file
from tests.support.commands import start
from tests.support.runs import chat, read_rows, write_lines
from tests.support.waiting import wait_until

ROWS = 40
RUNNER = "airflow_vllm_batch.runner"


@pytest.fixture
def slow_run(tmp_path: Path) -> BatchSpec:
    """Return a run of forty rows that takes four seconds, with a checkpoint after every fourth row."""
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", f"p{number}") for number in range(ROWS)])
    spec = BatchSpec(
        run_key="process-test",
        attempt=None,
        inputs=(InputFile(uri=f"{tmp_path}/in.jsonl"),),
        output=OutputTarget(uri=f"{tmp_path}/out/", state_uri=f"{tmp_path}/out/"),
        model=ModelSpec(name="m"),
        engine=EngineSpec(kind="echo", delay_seconds=0.1),
        limits=Limits(max_in_flight=1, checkpoint_rows=4),
    )
    (tmp_path / "spec.json").write_bytes(spec.to_bytes())
    write_store_file(tmp_path / "store.json", StoreFile())
    return spec


def segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "out" / "_vllm_batch" / "1" / "segments").glob("*.zst"))


def start_runner(tmp_path: Path, *more: str, stdin: int | None = None) -> subprocess.Popen[str]:
    arguments = (RUNNER, "--spec", f"{tmp_path}/spec.json", "--store", f"{tmp_path}/store.json", *more)
    return start(*arguments, stdin=stdin)


def attempt(tmp_path: Path, number: int = 1) -> dict[str, object]:
    path = tmp_path / "out" / "_vllm_batch" / "1" / "attempts" / f"{number:02d}.json"
    return dict(json.loads(path.read_text()))


def finish(tmp_path: Path) -> dict[str, object]:
    """Make another try, let it end, and return its manifest."""
    runner = start_runner(tmp_path)
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 0, output
    rows = read_rows(tmp_path / "out" / "output.jsonl")
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(ROWS)]
    return dict(json.loads((tmp_path / "out" / "manifest.json").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_runner_with_75_and_everything_finished_is_in_storage(
    tmp_path: Path, slow_run: BatchSpec, number: signal.Signals
) -> None:
    runner = start_runner(tmp_path)
    wait_until(lambda: len(segments(tmp_path)) >= 2, what="two segments", seconds=30, pause_seconds=0.02)
    runner.send_signal(number)
    output, _ = runner.communicate(timeout=30)
    assert runner.returncode == 75, output
    record = attempt(tmp_path)
    assert (record["exit_code"], record["final"], record["reason"]) == (75, False, f"stopped: received {number.name}")
    assert record["ended_at"] is not None
    durable = record["by_outcome"]["succeeded"]  # type: ignore[index]
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert finish(tmp_path)["rows_reused"] == durable


def test_the_end_of_the_parent_is_a_stop(tmp_path: Path, slow_run: BatchSpec) -> None:
    runner = start_runner(tmp_path, "--stop-on-eof", stdin=subprocess.PIPE)
    wait_until(lambda: bool(segments(tmp_path)), what="a segment", seconds=30, pause_seconds=0.02)
    assert runner.stdin is not None
    runner.stdin.close()
    assert runner.wait(timeout=30) == 75
    assert attempt(tmp_path)["reason"] == "stopped: the parent process went away"


def test_after_sudden_death_the_next_try_keeps_every_row_of_a_checkpoint(tmp_path: Path, slow_run: BatchSpec) -> None:
    runner = start_runner(tmp_path)
    wait_until(lambda: len(segments(tmp_path)) >= 3, what="three segments", seconds=30, pause_seconds=0.02)
    os.killpg(runner.pid, signal.SIGKILL)
    runner.wait(timeout=30)
    kept = 4 * len(segments(tmp_path))
    manifest = finish(tmp_path)
    assert manifest["rows_reused"] == kept
    assert manifest["attempts"] == 2


def test_the_log_of_an_attempt_is_kept_and_holds_no_prompt(tmp_path: Path, slow_run: BatchSpec) -> None:
    finish(tmp_path)
    packed = tmp_path / "out" / "_vllm_batch" / "1" / "attempts" / "01.log.zst"
    text = zstandard.ZstdDecompressor().decompress(packed.read_bytes()).decode()
    assert "run process-test, attempt 1, model m" in text
    assert "p17" not in text
    assert attempt(tmp_path)["log"] == "_vllm_batch/1/attempts/01.log.zst"


def test_the_spool_is_gone_afterwards(tmp_path: Path, slow_run: BatchSpec) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    runner = start(RUNNER, "--spec", f"{tmp_path}/spec.json", env={"TMPDIR": str(scratch)})
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 0, output
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 64, "--spec"),
        (["--spec", "nowhere.json"], 69, "nowhere.json"),
        (["--spec", "spec.json", "--store", "nowhere.json"], 64, "nowhere.json"),
        (["--spec", "spec.json", "--wrong"], 64, "--wrong"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, slow_run: BatchSpec, arguments: list[str], code: int, words: str
) -> None:
    runner = start(RUNNER, *[f"{tmp_path}/{word}" if word.endswith(".json") else word for word in arguments])
    output, _ = runner.communicate(timeout=60)
    assert (runner.returncode, words in output, "Traceback" in output) == (code, True, False), output


def test_a_spec_of_another_version_is_refused_with_what_to_do(tmp_path: Path, slow_run: BatchSpec) -> None:
    document = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**document, "contract_version": "2.0"}))
    runner = start_runner(tmp_path)
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 64
    assert "install the same version of airflow-provider-vllm-batch on both sides" in output
