"""Every case file through the three places that judge lines: the command line, the operator's preflight, the runner."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from airflow_vllm_batch.arguments import Refusal
from airflow_vllm_batch.batchfile import InputRejectedError
from airflow_vllm_batch.cli import main
from airflow_vllm_batch.contract import ExitCode, InputFile, ModelSpec, RowPolicy
from airflow_vllm_batch.preflight import check_rows
from airflow_vllm_batch.runner.engine.echo_engine import EchoEngine
from airflow_vllm_batch.storage.access import Access
from tests.support.runs import LocalRun

CASES = Path(__file__).parents[1] / "cases"
INDEX = json.loads((CASES / "index.json").read_bytes())
FILES = [case["file"] for case in INDEX["cases"]]


def case_of(file: str) -> dict[str, Any]:
    return next(dict(case) for case in INDEX["cases"] if case["file"] == file)


def allowed(line: dict[str, Any]) -> set[str]:
    """Return the outcomes that are right for a line where there is no engine to decide."""
    return {"run"} if line.get("needs") else {line["outcome"], *line.get("also_ok", ())}


def check_outcomes(file: str, bad_lines: set[int]) -> None:
    for line in case_of(file)["policy_isolate"]["lines"]:
        if line["outcome"] == "skip":
            assert line["line"] not in bad_lines, line
            continue
        assert ("error" if line["line"] in bad_lines else "run") in allowed(line), (file, line)


def certain(file: str, outcome: str) -> int:
    return sum(allowed(line) == {outcome} for line in case_of(file)["policy_isolate"]["lines"])


def lenient(file: str) -> bool:
    """Whether the index leaves an outcome open, so that counts alone decide nothing."""
    return any(len(allowed(line)) > 1 for line in case_of(file)["policy_isolate"]["lines"])


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_validate_says_what_the_index_says(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of(file)
    code = main(["validate", str(CASES / file), "--model", "m", "--json"])
    found = json.loads(capsys.readouterr().out)
    whole = [error for error in found["errors"] if error["line"] is None]
    if case["policy_isolate"].get("file") == "reject":
        assert (code, len(whole), found["runnable"]) == (65, 1, 0)
        assert whole[0]["code"] == case["policy_isolate"]["code"]
        return
    assert whole == []
    check_outcomes(file, {error["line"] for error in found["errors"]})
    assert found["lines"] == len(case["policy_isolate"]["lines"])
    assert code == (0 if found["runnable"] else 65)
    for error in found["errors"]:
        assert f"line {error['line']}" in error["message"]


def test_validate_strict_says_what_the_index_says(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["validate", str(CASES / file), "--model", "m", "--bad-lines", "strict", "--json"])
    capsys.readouterr()
    assert code == (0 if case_of(file)["policy_strict"] == "accept" else 65)


async def test_preflight_says_what_the_index_says(file: str, tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [])
    spec = run.spec(
        inputs=(InputFile(uri=str(CASES / file)),),
        model=ModelSpec(name="m"),
        policy=RowPolicy(run_anyway=True),
    )
    case = case_of(file)["policy_isolate"]
    if case.get("file") == "reject":
        with pytest.raises(Refusal) as refused:
            await check_rows(spec, Access.ambient(), "full")
        assert refused.value.exit_code is ExitCode.INPUT_REFUSED
        return
    found = await check_rows(spec, Access.ambient(), "full")
    assert found.requests == sum(line["outcome"] != "skip" for line in case["lines"])
    if not lenient(file):
        assert (found.runnable, found.bad) == (certain(file, "run"), certain(file, "error"))


async def test_the_runner_does_what_the_index_says(file: str, tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [])
    shutil.copyfile(CASES / file, run.input)
    case = case_of(file)["policy_isolate"]
    if case.get("file") == "reject":
        with pytest.raises(InputRejectedError):
            await run.run(EchoEngine(("m",)))
        return
    _, manifest = await run.run(EchoEngine(("m",)), allowed_failures=1.0)
    bad = {int(row["error"]["message"].removeprefix("line ").partition(":")[0]) for row in run.failed}
    check_outcomes(file, bad)
    requests = sum(line["outcome"] != "skip" for line in case["lines"])
    assert len(run.succeeded) + len(run.failed) == requests == manifest.counts.rows


async def test_the_runner_under_strict_starts_nothing_for_a_file_that_is_refused(file: str, tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [])
    shutil.copyfile(CASES / file, run.input)
    if case_of(file)["policy_strict"] == "accept":
        exit_code, _ = await run.run(EchoEngine(("m",)), bad_lines="strict", allowed_failures=1.0)
        assert exit_code is ExitCode.PASSED
    else:
        with pytest.raises(InputRejectedError):
            await run.run(EchoEngine(("m",)), bad_lines="strict")
