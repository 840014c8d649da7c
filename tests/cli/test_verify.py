"""``vllm-batch verify``: the outputs are what the manifest says, or the one that is not is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import vllm_batch
from tests.support.runs import chat, write_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in.jsonl", [chat("a", "one"), chat("b", "two"), chat("c", "three", model="other")])
    vllm_batch("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--engine", "echo", cwd=tmp_path)
    return tmp_path


def test_outputs_that_are_whole_are_named_with_their_size(folder: Path) -> None:
    done = vllm_batch("verify", "out", cwd=folder)
    assert done.code == 0, done.err
    assert f"as named  {folder}/out/output.jsonl (2 lines, " in done.out
    assert f"as named  {folder}/out/errors.jsonl (1 lines, " in done.out


def swap_a_letter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"one", b"ONE", 1))


def append_a_line(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"{}\n")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (swap_a_letter, "output.jsonl is not what the manifest names: sha256 "),
        (append_a_line, "output.jsonl is not what the manifest names: bytes "),
        (Path.unlink, "output.jsonl"),
    ],
)
def test_an_output_that_is_not_what_it_was_is_named(folder: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(folder / "out" / "output.jsonl")
    done = vllm_batch("verify", "out", cwd=folder)
    assert (done.code, words in done.err, "Traceback" in done.err) == (69, True, False), done.err


def test_a_folder_without_a_finished_run_has_nothing_to_verify(tmp_path: Path) -> None:
    done = vllm_batch("verify", "out", cwd=tmp_path)
    assert (done.code, "no finished run in" in done.err) == (69, True)
