"""The case lines that only an engine can judge, on real vLLM: each ends as the index says, and none harms another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import ENVIRONMENT
from tests.support.commands import ROOT, vllm_batch
from tests.support.runs import chat, read_rows

CASES = ROOT / "tests" / "cases"
INDEX = json.loads((CASES / "index.json").read_bytes())


class Judged(NamedTuple):
    custom_id: str
    request: dict[str, Any]
    expected: dict[str, Any]


def lines_for_an_engine() -> list[Judged]:
    """Return the lines marked ``needs: engine`` of files for a model that generates, under ids of their own."""
    found = []
    for case in INDEX["cases"]:
        if case.get("served_task", "generate") != "generate":
            continue
        lines = (CASES / case["file"]).read_bytes().split(b"\n")
        for expected in case["policy_isolate"]["lines"]:
            if expected.get("needs") == "engine":
                custom_id = f"{case['case']}:{expected['line']}"
                request = {**json.loads(lines[expected["line"] - 1]), "custom_id": custom_id}
                if b'"max_tokens"' not in lines[expected["line"] - 1] and "chat" in request["url"]:
                    request["body"]["max_tokens"] = 4
                found.append(Judged(custom_id, request, expected))
    return found


LINES = lines_for_an_engine()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> dict[str, dict[str, Any]]:
    """Run every such line between two good ones, on a model with the context that the index assumes."""
    folder: Path = tmp_path_factory.mktemp("cases")
    requests = [
        chat("first", "hello", max_tokens=2),
        *(line.request for line in LINES),
        chat("last", "bye", max_tokens=2),
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    context = INDEX["assumed_context_length"]
    done = vllm_batch(
        *("run", "-i", "in.jsonl", "-o", "out/", "--model", tiny_llama, "--served-model-name", "m"),
        *("--allowed-failures", "1.0", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
        *("--max-model-len", str(context), "--hf-overrides", json.dumps({"max_position_embeddings": context})),
        cwd=folder,
        env=ENVIRONMENT,
        seconds=850,
    )
    assert done.code == 0, done.err[-3000:]
    rows = read_rows(folder / "out" / "output.jsonl") + read_rows(folder / "out" / "errors.jsonl")
    assert len(rows) == len(requests)
    return {row["custom_id"]: row for row in rows}


@pytest.mark.parametrize("line", LINES, ids=[line.custom_id for line in LINES])
def test_each_line_ends_where_the_index_says(outcomes: dict[str, dict[str, Any]], line: Judged) -> None:
    row = outcomes[line.custom_id]
    if line.expected["outcome"] == "run":
        return  # either file is right, depending on the model; that it ended at all is what counts
    ended = "run" if row["error"] is None else "error"
    assert ended in {line.expected["outcome"], *line.expected.get("also_ok", ())}, row
    if ended == "error":
        assert row["error"]["code"] in {line.expected["code"], *line.expected.get("also_code", ())}, row["error"]


def test_no_line_harms_another(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["first"]["error"] is None
    assert outcomes["last"]["error"] is None
