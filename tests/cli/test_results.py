"""``vllm-batch results`` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import vllm_batch
from tests.support.runs import chat, write_lines

LINES = [chat("a", "one"), "{broken", chat("b", "two", model="other"), chat("c", "three")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in.jsonl", LINES)
    arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--engine", "echo", "--allowed-failures", "2")
    assert vllm_batch(*arguments, cwd=tmp_path).code == 0
    return tmp_path


def ids(text: str) -> list[str | None]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_all_rows_or_the_failed_ones(folder: Path) -> None:
    assert ids(vllm_batch("results", "out", cwd=folder).out) == ["a", "c", None, "b"]
    assert ids(vllm_batch("results", "out", "--failed", cwd=folder).out) == [None, "b"]


def test_failed_requests_come_out_as_they_were_and_can_be_run(folder: Path) -> None:
    done = vllm_batch("results", "out", "--failed", "--requests", cwd=folder)
    assert (done.code, done.out) == (0, "{broken\n" + json.dumps(LINES[2]) + "\n")
    (folder / "again.jsonl").write_text(done.out.splitlines()[1] + "\n")
    arguments = ("run", "-i", "again.jsonl", "-o", "again/", "--model", "other", "--engine", "echo")
    assert vllm_batch(*arguments, cwd=folder).code == 0


def test_one_file_gives_the_same_rows(folder: Path) -> None:
    arguments = ("run", "-i", "in.jsonl", "-o", "all.jsonl", "--model", "m", "--engine", "echo")
    assert vllm_batch(*arguments, cwd=folder).code == 3
    assert ids(vllm_batch("results", "all.jsonl", "--failed", cwd=folder).out) == [None, "b"]
    failed = vllm_batch("results", "all.jsonl", "--failed", "--requests", cwd=folder).out
    assert failed == "{broken\n" + json.dumps(LINES[2]) + "\n"


def test_an_input_that_was_replaced_is_refused(folder: Path) -> None:
    write_lines(folder / "in.jsonl", [chat("x")])
    done = vllm_batch("results", "out", "--requests", cwd=folder)
    assert done.code == 69
    assert "in.jsonl" in done.err


def test_a_folder_without_a_finished_run_is_exit_69(folder: Path) -> None:
    done = vllm_batch("results", "nothing", cwd=folder)
    assert done.code == 69
    assert "no finished run" in done.err
