"""Every case file of tests/cases, line by line, against what its index promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_vllm_batch.batchfile import BadRow, Checker, InputRejectedError, LineSplitter, Row, Rules, scan, validate

CASES = Path(__file__).parent.parent / "cases"
INDEX = json.loads((CASES / "index.json").read_bytes())
RULES = Rules(served_names=frozenset({INDEX["served_model"]}))


class ExpectedLine(NamedTuple):
    file: str
    number: int
    expected: dict[str, Any]
    raw: bytes
    verdict: Row | BadRow | None


def lines_of(file: str, rules: Rules = RULES) -> list[tuple[int, bytes, Row | BadRow | None]]:
    splitter, checker = LineSplitter(rules.max_row_bytes), Checker(rules)
    content = (CASES / file).read_bytes()
    lines = [*splitter.feed(content), *splitter.finish()]
    assert all(line.raw is not None for line in lines)
    return [(line.number, line.raw or b"", checker.check(line.number, line.raw or b"")) for line in lines]


def expected_lines() -> Iterator[ExpectedLine]:
    for case in INDEX["cases"]:
        expected = case["policy_isolate"]["lines"]
        if not expected:
            continue
        found = lines_of(case["file"])
        assert [line["line"] for line in expected] == [number for number, _, _ in found], case["file"]
        for line, (number, raw, verdict) in zip(expected, found, strict=True):
            yield ExpectedLine(case["file"], number, line, raw, verdict)


LINES = list(expected_lines())
NAMES = [f"{line.file}:{line.number}" for line in LINES]


def outcome(verdict: Row | BadRow | None) -> str:
    return "skip" if verdict is None else "run" if isinstance(verdict, Row) else "error"


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_each_line_has_the_outcome_of_the_index(line: ExpectedLine) -> None:
    if line.expected.get("needs"):
        # Only an engine can decide; without one the line is handed on.
        assert outcome(line.verdict) == "run"
    else:
        assert outcome(line.verdict) in {line.expected["outcome"], *line.expected.get("also_ok", ())}


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_a_fault_has_the_code_and_names_line_and_field(line: ExpectedLine) -> None:
    if not isinstance(line.verdict, BadRow):
        return
    fault = line.verdict.fault
    assert fault.code in {line.expected["code"], *line.expected.get("also_code", ())}
    assert fault.message.startswith(f"line {line.number}: ")
    assert line.expected.get("field", "") in fault.message
    assert fault.message.isprintable()


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_a_runnable_line_is_handed_on_unchanged(line: ExpectedLine) -> None:
    if not isinstance(line.verdict, Row):
        return
    request = json.loads(line.raw.removeprefix(b"\xef\xbb\xbf"))
    assert line.verdict.custom_id == request["custom_id"]
    assert line.verdict.url == request["url"]
    assert line.verdict.body in line.raw
    assert json.loads(line.verdict.body) == request["body"]


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_the_custom_id_of_a_bad_line_is_the_one_given_or_null(line: ExpectedLine) -> None:
    if not isinstance(line.verdict, BadRow):
        return
    try:
        request = json.loads(line.raw.decode(errors="replace"), strict=False)
        given = request.get("custom_id") if isinstance(request, dict) else None
    except ValueError:
        given = None
    except RecursionError:
        given = "deep-2"
    usable = isinstance(given, str) and given.strip() and line.raw.count(b'"custom_id"') == 1
    assert line.verdict.custom_id == (given if usable else None)


@pytest.mark.parametrize("case", INDEX["cases"], ids=lambda case: case["file"])
def test_strict_refuses_exactly_the_files_of_the_index(case: dict[str, Any]) -> None:
    content = (CASES / case["file"]).read_bytes()
    refused = case["policy_strict"] == "reject"
    assert validate([content], RULES).refused(strict=True) is refused
    # What the served task decides is the engine's matter, so knowing it beforehand must not change the verdict.
    task = case.get("served_task", "generate")
    assert validate([content], Rules(RULES.served_names, task)).refused(strict=True) is refused


@pytest.mark.parametrize(
    "case", [case for case in INDEX["cases"] if case["policy_isolate"].get("file")], ids=lambda case: case["file"]
)
def test_a_file_that_is_no_batch_file_is_rejected_as_a_whole(case: dict[str, Any]) -> None:
    with pytest.raises(InputRejectedError) as caught:
        list(scan([(CASES / case["file"]).read_bytes()], RULES))
    assert caught.value.code == case["policy_isolate"]["code"]


@pytest.mark.parametrize(("file", "line"), [("val-11-mixed-endpoints.jsonl", 4), ("val-11-mixed-endpoints.jsonl", 5)])
def test_an_endpoint_that_the_task_rules_out_is_foreseen(file: str, line: int) -> None:
    verdict = lines_of(file, Rules(RULES.served_names, "generate"))[line - 1][2]
    assert isinstance(verdict, BadRow)
    assert verdict.fault.code == "unsupported_url"
    assert not verdict.fault.counts_for_strict


def test_no_message_repeats_a_prompt() -> None:
    for line in LINES:
        if isinstance(line.verdict, BadRow):
            assert "river" not in line.verdict.fault.message.lower()


def test_the_copy_of_the_cases_is_complete() -> None:
    listed = {case["file"] for case in INDEX["cases"]}
    assert {path.name for path in CASES.glob("*.jsonl")} == listed
    assert (CASES / ".gitattributes").read_bytes() == b"*.jsonl -text\n"
