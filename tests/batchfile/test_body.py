"""The bodies of the six endpoints: names, types and ranges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_vllm_batch.batchfile import BadRow, Checker, Row, Rules
from airflow_vllm_batch.batchfile.body import NOT_ALLOWED, parameter_table
from tests.batchfile.batch_lines import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, MINIMAL, RERANK, RESPONSES, SCORE, line


def verdict(url: str, rules: Rules | None = None, /, **body: Any) -> str:
    """Return ``run``, or code and field of the fault."""
    found = Checker(rules or Rules()).check(1, line(url, **body))
    return "run" if isinstance(found, Row) else f"{found.fault.code} {found.fault.field}" if found else "skip"


def message(url: str, /, **body: Any) -> str:
    found = Checker(Rules()).check(1, line(url, **body))
    assert isinstance(found, BadRow)
    return found.fault.message


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1.7, "0.5", None], [-1, -0.1, "hot", "nan", True, [], {}, ""]),
        ("top_p", [1, 0.1, 1e-9], [0, 1.5, -1, "all"]),
        ("top_k", [-1, 0, 5, 5.0], [-2, 1.5, "x"]),
        ("min_p", [0, 1, 0.5], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2, 0], [-2.1, 3]),
        ("frequency_penalty", [-2, 2, 0], [-2.1, 3]),
        ("repetition_penalty", [0.1, 1.1], [0, -1]),
        ("n", [1, 3, 1.0, "2"], [0, -1, 1.5]),
        ("max_tokens", [1, 256.0, 10**9], [0, -5, 16.5, "many", [1]]),
        ("max_completion_tokens", [32], [0]),
        ("min_tokens", [0, 3], [-1]),
        ("seed", [0, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5]),
        ("logprobs", [True, False, "true", 1], ["maybe", 7, []]),
        ("top_logprobs", [0, 5, -1], [-2, 1.5]),
        ("prompt_logprobs", [0, 5], [-1, -2, "-1"]),
        ("stop", ["x", ["x", "y"], []], ["", [""], [1], 5, {}]),
        ("stop_token_ids", [[], [0, 5]], [[-1], ["a"], [1.5], "x"]),
        ("allowed_token_ids", [[1]], [[None]]),
        ("bad_words", [["x"]], [[""], "x"]),
        ("logit_bias", [{}, {"50": 1.5}], [{"a": 1}, {"-1": 1}, {"5": "x"}, {"5": None}, [], 5]),
        ("user", ["u", ""], [5, []]),
        ("ignore_eos", [True, 0], ["perhaps", 2]),
        ("structured_outputs", [{"json": {}}, {"choice": ["a"]}], ["x", {"json": {}, "regex": "a"}, {"choice": []}]),
        ("chat_template_kwargs", [{"enable_thinking": False}, {}], [[], "x"]),
        ("documents", [[{"title": "a"}]], ["x"]),
        ("metadata", [{"a": "b"}, "anything"], []),
    ],
)
def test_chat_parameters_take_what_vllm_takes(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert verdict(CHAT, **{name: value}) == "run", value
    for value in bad:
        assert verdict(CHAT, **{name: value}).startswith(f"invalid_request body.{name}"), value


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, None),
        ({"type": "structural_tag", "format": {}}, None),
        ({"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}, None),
        ({"type": "json_schema", "json_schema": {"name": "r", "schema": None}}, None),
        ({}, "response_format.type"),
        ({"type": 5}, "response_format.type"),
        ({"type": "json"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "response_format.json_schema.schema"),
        ([], "response_format"),
    ],
)
def test_response_format(value: Any, field: str | None) -> None:
    assert verdict(CHAT, response_format=value) == ("run" if field is None else f"invalid_request body.{field}")


TOOL = {"type": "function", "function": {"name": "w"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [TOOL]}, None),
        ({"tools": [TOOL], "tool_choice": "required"}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "w"}}}, None),
        ({"tool_choice": None}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": ["w"]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
    ],
)
def test_tools_and_tool_choice(body: dict[str, Any], field: str | None) -> None:
    assert verdict(CHAT, **body) == ("run" if field is None else f"invalid_request body.{field}")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("x", None),
        (["x", "y"], None),
        ([1, 2, 3], None),
        ([[1, 2], [3]], None),
        ("", "prompt"),
        ([], "prompt"),
        (..., "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"text": "x"}, "prompt"),
        ([1, "two"], "prompt"),
        (["two", 1], "prompt"),
        (["x", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], [-1]], "prompt[1]"),
        ([-1, 5], "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
    ],
)
@pytest.mark.parametrize("url", [COMPLETIONS, EMBEDDINGS])
def test_prompts_and_inputs_are_texts_or_token_ids(url: str, prompt: Any, field: str | None) -> None:
    name = "prompt" if url == COMPLETIONS else "input"
    expected = "run" if field is None else f"invalid_request body.{field.replace('prompt', name)}"
    assert verdict(url, **{name: prompt}) == expected


def test_nothing_needs_to_be_generated_where_the_prompt_is_echoed() -> None:
    assert verdict(COMPLETIONS, max_tokens=0) == "invalid_request body.max_tokens"
    assert verdict(COMPLETIONS, max_tokens=0, echo=True, logprobs=1) == "run"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"dimensions": 1}, "run"),
        ({"dimensions": 0}, "invalid_request body.dimensions"),
        ({"encoding_format": "base64"}, "run"),
        ({"encoding_format": "floats"}, "invalid_request body.encoding_format"),
        ({"input": ..., "messages": MESSAGES}, "run"),
        ({"input": ..., "messages": [MESSAGES, MESSAGES]}, "run"),
        ({"input": MESSAGES}, "run"),
        ({"input": [MESSAGES]}, "run"),
        ({"input": ..., "messages": [MESSAGES, []]}, "invalid_request body.messages[1]"),
        ({"input": [{"content": "x"}]}, "invalid_request body.input[0].role"),
        ({"input": ..., "prompt": "river"}, "invalid_request body.input"),
    ],
)
def test_embeddings(body: dict[str, Any], expected: str) -> None:
    assert verdict(EMBEDDINGS, **body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text_2": ["lake", "sea"]}, "run"),
        ({"text_1": ..., "text_2": ..., "queries": "a", "documents": ["b"]}, "run"),
        ({"text_1": ..., "text_2": ..., "queries": "a", "items": ["b"]}, "run"),
        ({"text_1": ..., "text_2": ..., "data_1": "a", "data_2": "b"}, "run"),
        ({"text_1": ..., "text_2": ..., "queries": "a"}, "invalid_request body.documents"),
        ({"text_2": ...}, "invalid_request body.text_2"),
        ({"text_1": ..., "text_2": ...}, "invalid_request body.text_1"),
        ({"text_2": []}, "invalid_request body.text_2"),
        ({"text_2": 5}, "invalid_request body.text_2"),
        ({"text_2": ["a", 5]}, "invalid_request body.text_2[1]"),
        ({"text_2": {"content": [{"type": "text", "text": "x"}]}}, "run"),
        ({"text_2": {"content": "x"}}, "invalid_request body.text_2.content"),
        ({"top_n": 1}, "unknown_parameter body.top_n"),
    ],
)
def test_score(body: dict[str, Any], expected: str) -> None:
    assert verdict(SCORE, **body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"top_n": 1}, "run"),
        ({"top_n": -1}, "invalid_request body.top_n"),
        ({"query": ...}, "invalid_request body.query"),
        ({"query": ["a"]}, "invalid_request body.query"),
        ({"documents": ...}, "invalid_request body.documents"),
        ({"documents": []}, "invalid_request body.documents"),
        ({"documents": "lake"}, "run"),
    ],
)
def test_rerank(body: dict[str, Any], expected: str) -> None:
    assert verdict(RERANK, **body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": MESSAGES, "max_output_tokens": 16, "instructions": "Be short."}, "run"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "run"),
        ({"input": ""}, "invalid_request body.input"),
        ({"input": []}, "invalid_request body.input"),
        ({"input": 5}, "invalid_request body.input"),
        ({"input": ["x"]}, "invalid_request body.input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "invalid_request body.input[0].content"),
        ({"input": ..., "messages": MESSAGES}, "invalid_request body.input"),
        ({"max_output_tokens": 0}, "invalid_request body.max_output_tokens"),
        ({"max_tokens": 5}, "unknown_parameter body.max_tokens"),
        ({"background": True}, "parameter_not_allowed body.background"),
        ({"background": False}, "run"),
        ({"previous_response_id": "resp_1"}, "parameter_not_allowed body.previous_response_id"),
        ({"previous_response_id": None}, "run"),
        ({"conversation": "conv_1"}, "parameter_not_allowed body.conversation"),
        ({"tool_choice": "auto"}, "run"),
    ],
)
def test_responses(body: dict[str, Any], expected: str) -> None:
    assert verdict(RESPONSES, **body) == expected


@pytest.mark.parametrize(
    ("url", "name", "hint"),
    [
        (CHAT, "max_token", "did you mean max_tokens?"),
        (CHAT, "temprature", "did you mean temperature?"),
        (CHAT, "max_new_tokens", "did you mean max_tokens?"),
        (CHAT, "stop_sequences", "did you mean stop?"),
        (COMPLETIONS, "top_P", "names are case-sensitive, did you mean top_p?"),
        (RESPONSES, "max_tokens", "did you mean max_output_tokens?"),
        (RERANK, "top_k", "did you mean top_n?"),
        (CHAT, "guided_json", 'use response_format or structured_outputs: {"json": …}'),
        (CHAT, "guided_decoding_backend", "vLLM removed it, and the engine chooses now"),
        (CHAT, "xyzzy", "is not a parameter of /v1/chat/completions"),
    ],
)
def test_an_unknown_name_comes_with_the_one_that_was_meant(url: str, name: str, hint: str) -> None:
    assert message(url, **{name: 1}).endswith(hint)


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_what_reaches_beyond_the_row_is_refused_unless_allowed(name: str) -> None:
    assert verdict(CHAT, **{name: "x"}) == f"parameter_not_allowed body.{name}"
    assert verdict(CHAT, **{name: None}) == "run"
    assert verdict(CHAT, Rules(allow_parameters=frozenset({name})), **{name: "x"}) in {
        "run",
        f"invalid_request body.{name}",  # a known parameter keeps its type
    }


def test_a_template_is_refused_among_the_template_arguments_too() -> None:
    body = {"chat_template_kwargs": {"chat_template": "{{ x }}"}}
    assert verdict(CHAT, **body) == "parameter_not_allowed body.chat_template_kwargs.chat_template"
    assert verdict(CHAT, Rules(allow_parameters=frozenset({"chat_template"})), **body) == "run"


def test_embeddings_of_a_prompt_may_replace_it_where_they_are_allowed() -> None:
    body = {"prompt": ..., "prompt_embeds": "gAN9cQAu"}
    assert verdict(COMPLETIONS, **body) == "invalid_request body.prompt"
    assert verdict(COMPLETIONS, Rules(allow_parameters=frozenset({"prompt_embeds"})), **body) == "run"


@pytest.mark.parametrize("url", MINIMAL)
def test_every_known_parameter_may_be_null(url: str) -> None:
    required = {*MINIMAL[url], "messages", "queries", "documents", "items", "data_1", "data_2", "prompt", "input"}
    names = {name: None for name in parameter_table()[url] if name not in required}
    assert verdict(url, **names) == "run"


def test_the_table_says_what_it_was_made_from() -> None:
    from importlib.resources import files

    table = json.loads(files("airflow_vllm_batch.batchfile").joinpath("parameters.json").read_bytes())
    assert table["versions"]["vllm"]
    assert table["endpoints"].keys() == MINIMAL.keys()
