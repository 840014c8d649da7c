"""An engine that can't start, or is stopped while it does: the exit code, the cause, and nothing left running."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import ENGINE_FLAGS, ENVIRONMENT
from tests.support.commands import start, vllm_batch
from tests.support.runs import chat, write_lines
from tests.support.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in.jsonl", [chat("a", "hello", max_tokens=4)])
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--no-such-flag", "1"], 64, "no-such-flag"),
        (["--max-model-len", "lots"], 64, "max-model-len"),
        (["--api-key", "secret"], 64, "is for a listening server"),
    ],
)
def test_a_wrong_engine_flag_is_exit_64(folder: Path, tiny_llama: str, flags: list[str], code: int, words: str) -> None:
    arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", tiny_llama, *flags)
    done = vllm_batch(*arguments, cwd=folder, env=ENVIRONMENT, seconds=850)
    assert done.code == code, done.err[-3000:]
    assert words in done.err.splitlines()[-1]


def test_a_model_that_can_not_be_loaded_is_exit_78_with_its_cause(folder: Path, tiny_llama: str) -> None:
    broken = folder / "broken-model"
    shutil.copytree(tiny_llama, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    done = vllm_batch(
        *("run", "-i", "in.jsonl", "-o", "out/", "--model", str(broken), *ENGINE_FLAGS),
        cwd=folder,
        env=ENVIRONMENT,
        seconds=850,
    )
    assert done.code == 78, done.err[-3000:]
    last = done.err.splitlines()[-1]
    assert "vLLM can't start" in last
    assert "safetensor" in last.lower()
    record = json.loads((folder / "out" / "_vllm_batch" / "1" / "attempts" / "01.json").read_text())
    assert (record["exit_code"], record["final"], record["phase"]) == (78, True, "loading")


def test_a_context_longer_than_the_models_is_exit_78(folder: Path, tiny_llama: str) -> None:
    arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", tiny_llama, "--max-model-len", "10000000")
    done = vllm_batch(*arguments, cwd=folder, env=ENVIRONMENT, seconds=850)
    assert done.code == 78, done.err[-3000:]
    assert "max_model_len" in done.err.splitlines()[-1]


def test_a_stop_while_the_model_loads_is_heard_and_leaves_no_process(folder: Path, tiny_llama: str) -> None:
    arguments = ("run", "-i", f"{folder}/in.jsonl", "-o", f"{folder}/out/", "--model", tiny_llama, *ENGINE_FLAGS)
    process = start("airflow_vllm_batch.cli", *arguments, env=ENVIRONMENT)

    def engine_processes() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    children = wait_until(engine_processes, seconds=300, what="a process of the engine")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output[-3000:]
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    record = json.loads((folder / "out" / "_vllm_batch" / "1" / "attempts" / "01.json").read_text())
    assert (record["exit_code"], record["final"]) == (75, False)
