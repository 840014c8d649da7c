"""``vllm-batch cancel`` and ``--completion-window``: a run that ends early, as a user sees it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import start, vllm_batch
from tests.support.runner_process import end_now, end_of
from tests.support.runs import chat, read_rows, write_lines
from tests.support.waiting import wait_until

ROWS = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", f"p{number}") for number in range(ROWS)])
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    places = ("-i", f"{folder}/in.jsonl", "-o", f"{folder}/out/")
    return ["run", *places, "--model", "m", "--engine", "echo", *more]


@pytest.fixture
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a run of half a minute that has put a segment."""
    slow = arguments(folder, "--delay-seconds", "0.1", "--max-in-flight", "1", "--checkpoint-seconds", "0.5")
    process = start("airflow_vllm_batch.cli", *slow)
    segments = folder / "out" / "_vllm_batch" / "1" / "segments"
    wait_until(lambda: list(segments.glob("*.zst")), what="a segment", seconds=40, pause_seconds=0.05)
    yield process
    end_now(process)


def manifest(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "out" / "manifest.json").read_text()))


def test_a_cancelled_run_accounts_for_every_row_and_the_next_run_does_the_rest(
    folder: Path, running: subprocess.Popen[str]
) -> None:
    done = vllm_batch("cancel", "out", "--reason", "wrong model", cwd=folder)
    assert (done.code, done.out.startswith("Attempt 1 on ")) == (0, True), done.err
    code, said = end_of(running)
    assert code == 3, said
    assert "FAIL: cancelled, so it can't pass" in said
    found = manifest(folder)
    failed, succeeded = read_rows(folder / "out" / "errors.jsonl"), read_rows(folder / "out" / "output.jsonl")
    assert (found["state"], len(failed) + len(succeeded)) == ("cancelled", ROWS)
    assert succeeded
    assert {row["error"]["code"] for row in failed} == {"cancelled"}
    assert failed[0]["error"]["message"].startswith("cancelled by ")
    assert failed[0]["error"]["message"].endswith(": wrong model")
    again = vllm_batch("cancel", "out", cwd=folder)
    assert (again.code, "nothing runs in" in again.err) == (64, True)
    assert vllm_batch(*arguments(folder)).code == 0
    assert (manifest(folder)["state"], manifest(folder)["rows_reused"]) == ("completed", len(succeeded))


def test_a_request_for_an_attempt_that_is_over_cancels_nothing(folder: Path) -> None:
    assert vllm_batch(*arguments(folder, "--limit", "3")).code == 0
    path = folder / "out" / "_vllm_batch" / "1" / "cancel.json"
    path.write_text('{"contract_version":"1.0","attempt":1,"requested_at":"2026-01-02T03:04:05Z","requested_by":"ann"}')
    assert vllm_batch(*arguments(folder)).code == 0
    assert manifest(folder)["state"] == "completed"


def test_a_folder_without_a_run_can_not_be_cancelled(folder: Path) -> None:
    done = vllm_batch("cancel", "out", cwd=folder)
    assert (done.code, "no run in" in done.err) == (69, True)


def test_after_the_completion_window_rows_are_expired_and_the_next_run_does_them(folder: Path) -> None:
    done = vllm_batch(*arguments(folder, "--completion-window", "0.001"))
    assert done.code == 3
    assert f"{ROWS} expired" in done.out
    assert manifest(folder)["state"] == "expired"
    (row,) = {row["error"]["message"] for row in read_rows(folder / "out" / "errors.jsonl")}
    assert row == "the completion window of 0.001 s closed before the row was answered"
    assert vllm_batch(*arguments(folder)).code == 0
    assert len(read_rows(folder / "out" / "output.jsonl")) == ROWS
