"""Rules about the body, by endpoint: which members it must have, which it may have, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from airflow_vllm_batch.batchfile import values
from airflow_vllm_batch.batchfile.messages import messages_fault, response_input_fault, text_or_parts_fault
from airflow_vllm_batch.batchfile.rows import Fault, Rules
from airflow_vllm_batch.batchfile.values import ValueCheck, invalid
from airflow_vllm_batch.batchfile.wording import printable
from airflow_vllm_batch.contract import ErrorCode

NOT_ALLOWED = {
    "chat_template": "a template from a row would run where the engine runs",
    "logits_processors": "a class by name would be loaded where the engine runs",
    "prompt_embeds": "serialised tensors would be loaded where the engine runs",
    "kv_transfer_params": "engine wiring is not the row's",
    "ec_transfer_params": "engine wiring is not the row's",
    "background": "it has no meaning in a batch",
    "previous_response_id": "a batch keeps no state between requests",
    "conversation": "a batch keeps no state between requests",
}
"""Known parameters that a row may set only where the operator allows it, with the reason."""

RENAMED = {
    "guided_json": 'response_format or structured_outputs: {"json": …}',
    "guided_regex": 'structured_outputs: {"regex": …}',
    "guided_choice": 'structured_outputs: {"choice": […]}',
    "guided_grammar": 'structured_outputs: {"grammar": …}',
    "guided_whitespace_pattern": 'structured_outputs: {"whitespace_pattern": …}',
    "structural_tag": 'structured_outputs: {"structural_tag": …}',
    "guided_decoding_backend": None,
}
"""Parameters of older vLLM releases; None: gone without a successor."""

FOREIGN_NAMES = {
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_tokens", "max_output_tokens"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "stop_sequences": ("stop",),
    "random_seed": ("seed",),
    "repeat_penalty": ("repetition_penalty",),
    "system": ("messages", "instructions"),
    "messages": ("input", "prompt"),
    "prompt": ("messages", "input"),
    "normalize": ("use_activation",),
    "top_k": ("top_n",),
    "functions": ("tools",),
}
"""Names of other endpoints and products; the first of the list that the endpoint knows is meant."""

# Ranges that vLLM's models don't declare but its engine keeps to.
_RANGES: dict[str, ValueCheck] = {
    "temperature": values.NumberRange(minimum=0),
    "top_p": values.NumberRange(above=0, maximum=1),
    "top_k": values.NumberRange(minimum=-1, whole=True),
    "min_p": values.NumberRange(minimum=0, maximum=1),
    "presence_penalty": values.NumberRange(minimum=-2, maximum=2),
    "frequency_penalty": values.NumberRange(minimum=-2, maximum=2),
    "repetition_penalty": values.NumberRange(above=0),
    "n": values.NumberRange(minimum=1, whole=True),
    "max_tokens": values.NumberRange(minimum=1, whole=True),
    "max_completion_tokens": values.NumberRange(minimum=1, whole=True),
    "max_output_tokens": values.NumberRange(minimum=1, whole=True),
    "min_tokens": values.NumberRange(minimum=0, whole=True),
    "top_logprobs": values.NumberRange(minimum=-1, whole=True),
    "prompt_logprobs": values.prompt_logprobs,
    "dimensions": values.NumberRange(minimum=1, whole=True),
    "stop": values.stop,
    "bad_words": values.texts,
    "stop_token_ids": values.token_ids,
    "allowed_token_ids": values.token_ids,
    "logprob_token_ids": values.token_ids,
    "logit_bias": values.logit_bias,
    "response_format": values.response_format,
    "structured_outputs": values.structured_outputs,
    "encoding_format": values.encoding_format,
}

_REQUIRED: dict[str, tuple[tuple[str, ...], ...]] = {
    "/v1/chat/completions": (("messages",),),
    "/v1/completions": (("prompt",),),
    "/v1/embeddings": (("input",), ("messages",)),
    "/v1/responses": (("input",),),
    "/v1/score": (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")),
    "/v1/rerank": (("query", "documents"),),
}
"""Sets of members of which one must be there in full; the first is the usual one."""


class Whole(NamedTuple):
    """A rule about several members together."""

    member: str
    """It holds wherever this one is absent."""
    check: Callable[[Mapping[str, Any]], Fault | None]


class Endpoint(NamedTuple):
    """One endpoint under given rules."""

    url: str
    checks: Mapping[str, ValueCheck | None]
    """Every known name, with the check of its value."""
    required: tuple[tuple[str, ...], ...]
    whole: Whole | None


@cache
def parameter_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the generated table: url, parameter name, JSON types and bounds."""
    text = files("airflow_vllm_batch.batchfile").joinpath("parameters.json").read_text(encoding="utf-8")
    endpoints: dict[str, dict[str, dict[str, Any]]] = json.loads(text)["endpoints"]
    return endpoints


def endpoints(rules: Rules) -> dict[str, Endpoint]:
    """Return the six endpoints under these rules."""
    return {url: _endpoint(url, table, rules) for url, table in parameter_table().items()}


def _endpoint(url: str, table: Mapping[str, Mapping[str, Any]], rules: Rules) -> Endpoint:
    checks: dict[str, ValueCheck | None] = {name: values.json_type(parameter) for name, parameter in table.items()}
    checks |= {name: check for name, check in _RANGES.items() if name in table}
    checks |= _shapes(url, rules)
    # Checked with the envelope, before any other member of the body.
    checks |= {"model": None, "stream": None}
    for name in NOT_ALLOWED:
        if name in rules.allow_parameters:
            checks.setdefault(name, None)
        else:
            checks[name] = _refusal(name)
    for name in rules.allow_parameters:
        checks.setdefault(name, None)
    required = _REQUIRED[url]
    if url == "/v1/completions" and "prompt_embeds" in rules.allow_parameters:
        required = (*required, ("prompt_embeds",))
    return Endpoint(url, checks, required, _WHOLE.get(url))


def _shapes(url: str, rules: Rules) -> dict[str, ValueCheck]:
    """Return the checks of the members that hold prompts, which differ between endpoints."""

    def conversation(value: Any, field: str) -> Fault | None:
        return messages_fault(value, field, rules)

    def conversations(value: Any, field: str) -> Fault | None:
        if type(value) is list and value and all(type(item) is list for item in value):
            faults = (messages_fault(item, f"{field}[{index}]", rules) for index, item in enumerate(value))
            return next((fault for fault in faults if fault), None)
        return messages_fault(value, field, rules)

    def embedding_input(value: Any, field: str) -> Fault | None:
        first = value[0] if type(value) is list and value else None
        if type(first) is dict or (type(first) is list and first and type(first[0]) is dict):
            return conversations(value, field)
        return values.texts_or_token_ids(value, field)

    def response_input(value: Any, field: str) -> Fault | None:
        return response_input_fault(value, field, rules)

    def one(value: Any, field: str) -> Fault | None:
        return text_or_parts_fault(value, field, rules, many=False)

    def many(value: Any, field: str) -> Fault | None:
        return text_or_parts_fault(value, field, rules, many=True)

    shapes: dict[str, dict[str, ValueCheck]] = {
        "/v1/chat/completions": {"messages": conversation, "tools": values.chat_tools},
        # Nothing is generated where the prompt itself is echoed with its log-probabilities.
        "/v1/completions": {
            "prompt": values.texts_or_token_ids,
            "max_tokens": values.NumberRange(minimum=0, whole=True),
            "logprobs": values.NumberRange(minimum=-1, whole=True),
        },
        "/v1/embeddings": {"input": embedding_input, "messages": conversations},
        "/v1/responses": {"input": response_input},
        "/v1/score": dict.fromkeys(("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"), many),
        "/v1/rerank": {"query": one, "documents": many},
    }
    if "chat_template_kwargs" in parameter_table()[url] and "chat_template" not in rules.allow_parameters:
        shapes[url]["chat_template_kwargs"] = _template_arguments
    return shapes[url]


def _refusal(name: str) -> ValueCheck:
    def check(value: Any, field: str) -> Fault | None:
        if value is False:
            return None
        reason = f"{field} is not allowed: {NOT_ALLOWED[name]}; allow_parameters can admit it"
        return Fault(ErrorCode.PARAMETER_NOT_ALLOWED, field, reason)

    return check


def _template_arguments(value: Any, field: str) -> Fault | None:
    if type(value) is not dict:
        return invalid(field, "must be an object")
    if "chat_template" in value:
        return _refusal("chat_template")(value["chat_template"], f"{field}.chat_template")
    return None


def _completion_whole(body: Mapping[str, Any]) -> Fault | None:
    if body.get("max_tokens") in {0, "0"} and not body.get("echo"):
        return invalid("body.max_tokens", "must be at least 1 where echo is not set, found 0")
    return None


_WHOLE = {
    "/v1/chat/completions": Whole("tool_choice", values.chat_tool_choice_fault),
    "/v1/completions": Whole("max_tokens", _completion_whole),
}


def required_fault(body: Mapping[str, Any], endpoint: Endpoint) -> Fault | None:
    """Check that the members are there without which there is nothing to answer."""
    for names in endpoint.required:
        if all(body.get(name) is not None for name in names):
            return None
    # Of several sets the one that is begun is meant.
    names = next((names for names in endpoint.required if any(body.get(n) is not None for n in names)), ())
    name = next(name for name in names or endpoint.required[0] if body.get(name) is None)
    if name == "messages" and "messages" in body:
        return invalid("body.messages", "must be an array, got null")
    foreign = next((other for other in ("messages", "prompt", "input") if other != name and other in body), None)
    hint = f"; {foreign} belongs to another endpoint" if foreign else ""
    return invalid(f"body.{name}", f"is required by {endpoint.url}{hint}")


def unknown_fault(name: str, endpoint: Endpoint) -> Fault:
    """Return the fault of a name that the endpoint does not know, with the one that was probably meant."""
    field = f"body.{printable(name, 100)}"
    return Fault(
        ErrorCode.UNKNOWN_PARAMETER, field, f"{field} is not a parameter of {endpoint.url}{_hint(name, endpoint)}"
    )


def _hint(name: str, endpoint: Endpoint) -> str:
    if name in RENAMED:
        new = RENAMED[name]
        return f"; vLLM removed it, use {new}" if new else "; vLLM removed it, and the engine chooses now"
    for meant in FOREIGN_NAMES.get(name, ()):
        if meant in endpoint.checks:
            return f"; did you mean {meant}?"
    if name.lower() in endpoint.checks:
        return f"; names are case-sensitive, did you mean {name.lower()}?"
    near = get_close_matches(name[:100].lower(), endpoint.checks, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""
