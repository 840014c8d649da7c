"""What succeeded rows look like, and what may count as a bad answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_vllm_batch.contract import ExitCode
from airflow_vllm_batch.runner.answers import AnswerTally, Form, asked_form
from airflow_vllm_batch.runner.engine.base import Reply
from tests.support.runs import LocalRun, ScriptedEngine, answer, chat

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def counted(text: str, form: Form | None) -> tuple[int, int, int, int]:
    tally = AnswerTally()
    tally.add(answer(text), form)
    return tally.empty, tally.not_json, tally.schema_mismatch, tally.bad_rows


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Form(None)),
        ({"response_format": schema_format({"type": "null"})}, Form('{"type": "null"}')),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "null"}}}}, Form('{"type": "null"}')),
        ({"messages": [{"content": 'say "response_format"'}]}, None),
    ],
)
def test_the_form_is_read_where_each_endpoint_says_it(body: dict[str, Any], form: Form | None) -> None:
    assert asked_form(json.dumps(body).encode()) == form


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("hello", None, (0, 0, 0, 0)),
        ("", None, (1, 0, 0, 1)),
        ("", Form(None), (1, 0, 0, 1)),
        ('{"n": 1}', Form(None), (0, 0, 0, 0)),
        ("n is 1", Form(None), (0, 1, 0, 1)),
        ('{"n": 1}', Form(json.dumps(NUMBER)), (0, 0, 0, 0)),
        ('{"n": "one"}', Form(json.dumps(NUMBER)), (0, 0, 1, 1)),
        ('{"n": 1', Form(json.dumps(NUMBER)), (0, 1, 0, 1)),
        ("[" * 100_000, Form(None), (0, 1, 0, 1)),
    ],
)
def test_an_answer_is_held_against_the_form_that_its_row_asked_for(
    text: str, form: Form | None, expected: tuple[int, int, int, int]
) -> None:
    assert counted(text, form) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/nothing"},
        {"$ref": "#/definitions/missing"},
        {"type": "no-such-type"},
        {"pattern": "(", "type": "string"},
        {"minimum": "seven"},
        {"$schema": 5},
    ],
)
def test_a_schema_that_is_none_excludes_nothing_and_asks_nobody(schema: dict[str, Any]) -> None:
    assert counted('"text"', Form(json.dumps(schema)))[3] == 0
    assert counted("3", Form(json.dumps(schema)))[3] == 0


def test_tool_calls_and_refusals_are_no_empty_answers() -> None:
    tally = AnswerTally()
    call = {"message": {"content": None, "tool_calls": [{"id": "1"}]}, "finish_reason": "tool_calls"}
    refusal = {"message": {"content": None, "refusal": "I can't"}, "finish_reason": "stop"}
    silent = {"message": {"content": None, "reasoning": "…"}, "finish_reason": "length"}
    for choice in (call, refusal, silent):
        tally.add(json.dumps({"choices": [choice]}).encode(), None)
    assert (tally.empty, dict(tally.finish_reasons)) == (1, {"tool_calls": 1, "stop": 1, "length": 1})


def test_a_response_counts_by_its_status() -> None:
    tally = AnswerTally()
    text = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    tally.add(json.dumps({"status": "completed", "output": [{"type": "reasoning"}, text]}).encode(), None)
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    tally.add(json.dumps(cut).encode(), None)
    assert (dict(tally.finish_reasons), tally.empty) == ({"completed": 1, "max_output_tokens": 1}, 1)


def test_an_embedding_is_no_answer_that_could_be_empty() -> None:
    tally = AnswerTally()
    tally.add(b'{"object":"list","data":[{"embedding":[]}]}', None)
    assert (tally.empty, tally.bad_rows, tally.document().not_json) == (0, 0, None)


@pytest.mark.parametrize(("bad_answers", "exit_code"), [("count", ExitCode.PASSED), ("fail", ExitCode.TOO_MANY_FAILED)])
async def test_bad_answers_are_counted_and_fail_the_run_only_where_asked(
    tmp_path: Path, bad_answers: str, exit_code: ExitCode
) -> None:
    asks = {"response_format": schema_format(NUMBER)}
    run = LocalRun(
        tmp_path, [chat("good", '{"n": 1}', **asks), chat("text", "one", **asks), chat("other", '{"m": 1}', **asks)]
    )
    found, manifest = await run.run(
        ScriptedEngine(lambda text, _: Reply(200, answer(text))), bad_answers=bad_answers, allowed_failures=1
    )
    assert found is exit_code
    assert manifest.answers is not None
    assert (manifest.answers.not_json, manifest.answers.schema_mismatch, manifest.answers.bad_rows) == (1, 1, 2)
    # Rows are never altered, and never move: all three succeeded.
    assert [row["custom_id"] for row in run.succeeded] == ["good", "text", "other"]
    if bad_answers == "fail":
        assert manifest.verdict.overall.reason == (
            "2 of 3 rows failed, 1 allowed (allowed_failures=1), 2 of them for a bad answer"
        )
