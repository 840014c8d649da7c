"""Real vLLM that dies: killed from outside, by a row, and together with its runner."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from airflow_vllm_batch.runner.segments import unpack
from tests.engine.conftest import ENGINE_FLAGS, ENVIRONMENT
from tests.support.commands import start, vllm_batch
from tests.support.runs import chat, read_rows, write_lines
from tests.support.waiting import wait_until

LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def test_a_row_that_kills_vllm_is_found_and_the_others_are_answered(tmp_path: Path, tiny_llama: str) -> None:
    rows = [chat(f"r{number}", f"word {number}", max_tokens=4) for number in range(8)]
    rows[3]["body"]["vllm_xargs"] = {"poison": 1}
    write_lines(tmp_path / "in.jsonl", rows)
    done = vllm_batch(
        *("run", "-i", "in.jsonl", "-o", "out/", "--model", tiny_llama, "--served-model-name", "tiny"),
        *("--allowed-failures", "1", *ENGINE_FLAGS, "--logits-processors", "tests.support.poison:Poison"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        seconds=850,
    )
    assert done.code == 0, done.err[-3000:]
    assert len(read_rows(tmp_path / "out" / "output.jsonl")) == 7
    (crash,) = read_rows(tmp_path / "out" / "errors.jsonl")
    assert (crash["custom_id"], crash["response"], crash["error"]["code"]) == ("r3", None, "engine_crash")
    assert crash["error"]["message"] == "the engine died 2 times while this row alone was in it"


def test_vllm_killed_in_mid_run_is_restarted_and_nothing_of_it_outlives_a_killed_runner(
    tmp_path: Path, tiny_llama: str
) -> None:
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", f"word {number}", **LONG) for number in range(60)])
    command = ("run", "-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out/", "--model", tiny_llama)
    more = ("--served-model-name", "tiny", "--max-in-flight", "4", "--checkpoint-seconds", "0.5", *ENGINE_FLAGS)
    shared_before = shared_memory()
    process = start("airflow_vllm_batch.cli", *command, *more, env=ENVIRONMENT)
    state = tmp_path / "out" / "_vllm_batch" / "1"

    def progress() -> dict[str, Any]:
        try:
            return dict(json.loads((state / "progress.json").read_text()))
        except FileNotFoundError:
            return {}

    def engine_core() -> psutil.Process | None:
        for child in psutil.Process(process.pid).children(recursive=True):
            if "EngineCore" in " ".join(child.cmdline()):
                return child
        return None

    def first_rows() -> bool:
        return bool(list((state / "segments").glob("*.zst")))

    wait_until(first_rows, seconds=300, what="the first rows")
    engine = engine_core()
    assert engine is not None
    engine.kill()
    wait_until(lambda: progress().get("engine_restarts") == 1, seconds=300, what="the restart")
    durable = progress()["rows_durable"]
    wait_until(lambda: progress()["rows_durable"] > durable, seconds=300, what="rows of the new engine")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert shared_memory() <= shared_before
    done = vllm_batch(*command, *more, env=ENVIRONMENT, seconds=850)
    assert done.code == 0, done.err[-3000:]
    assert [row["custom_id"] for row in read_rows(tmp_path / "out" / "output.jsonl")] == [f"r{n}" for n in range(60)]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rows_reused"] >= durable


def test_sigterm_in_mid_run_puts_what_is_finished_and_ends_vllm(tmp_path: Path, tiny_llama: str) -> None:
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", f"word {number}", **LONG) for number in range(60)])
    process = start(
        *("airflow_vllm_batch.cli", "run", "-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out/"),
        *("--model", tiny_llama, "--served-model-name", "tiny", "--max-in-flight", "4"),
        *("--checkpoint-seconds", "0.5", *ENGINE_FLAGS),
        env=ENVIRONMENT,
    )
    state = tmp_path / "out" / "_vllm_batch" / "1"
    wait_until(lambda: list((state / "segments").glob("*.zst")), seconds=300, what="the first rows")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output[-3000:]
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    record = json.loads((state / "attempts" / "01.json").read_text())
    assert (record["exit_code"], record["reason"]) == (75, "stopped: received SIGTERM")
    held = [unpack(path.read_bytes())[0].rows for path in (state / "segments").glob("*.zst")]
    assert sum(held) == record["by_outcome"]["succeeded"] > 0
