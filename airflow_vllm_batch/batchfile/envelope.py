"""Rules about the members around the body, one function each. Each returns a fault or None."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from airflow_vllm_batch.batchfile.json_text import wrong_type
from airflow_vllm_batch.batchfile.rows import Fault, Task
from airflow_vllm_batch.batchfile.wording import kind, quote
from airflow_vllm_batch.contract import ErrorCode

TASK_OF_URL: dict[str, Task] = {
    "/v1/chat/completions": "generate",
    "/v1/completions": "generate",
    "/v1/responses": "generate",
    "/v1/embeddings": "embed",
    "/v1/score": "score",
    "/v1/rerank": "score",
}
ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
_DOES: dict[Task, str] = {"generate": "generate text", "embed": "embed", "score": "score or rerank"}

ANSWER_CHANGING = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        # how much and how many
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "n",
        "best_of",
        # sampling
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "stop_token_ids",
        "bad_words",
        "allowed_token_ids",
        "ignore_eos",
        # shape of the answer
        "response_format",
        "structured_outputs",
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "reasoning",
        "reasoning_effort",
        "instructions",
        "chat_template",
        "chat_template_kwargs",
        "encoding_format",
        "dimensions",
        "truncate_prompt_tokens",
    }
)
"""Body parameters that are a mistake beside body. Others, such as ``metadata`` or ``user``, may be anyone's notes."""


def _missing(name: str, request: Mapping[str, Any]) -> str:
    absent = [member for member in ("custom_id", "method", "url", "body") if member not in request]
    if len(absent) == 1:
        return f"{name} is required"
    if "response" in request and "error" in request:
        return f"{name} is required; this is a result row, not a request"
    listed = f"{', '.join(absent[:-1])} and {absent[-1]}"
    return f"{name} is required; {listed} are missing, so this is not a batch request (another format?)"


def custom_id_fault(request: Mapping[str, Any]) -> Fault | None:
    custom_id = request.get("custom_id")
    if type(custom_id) is str:
        if custom_id and not custom_id.isspace():
            return None
        reason = "custom_id is only white space" if custom_id else "custom_id is empty"
    elif "custom_id" in request:
        reason = f"custom_id must be a string, got {kind(custom_id)}"
    else:
        reason = _missing("custom_id", request)
    return Fault(ErrorCode.INVALID_REQUEST, "custom_id", reason)


def method_fault(request: Mapping[str, Any]) -> Fault | None:
    method = request.get("method")
    if method == "POST":
        return None
    if "method" not in request:
        return Fault(ErrorCode.INVALID_REQUEST, "method", _missing("method", request))
    if type(method) is not str:
        return Fault(ErrorCode.INVALID_REQUEST, "method", f"method must be a string, got {kind(method)}")
    return Fault(ErrorCode.UNSUPPORTED_METHOD, "method", f'method must be exactly "POST", found {quote(method)}')


def members_fault(request: Mapping[str, Any]) -> Fault | None:
    """Check that url and body are there and of their type."""
    url = request.get("url")
    if type(url) is not str:
        reason = f"url must be a string, got {kind(url)}" if "url" in request else _missing("url", request)
        return Fault(ErrorCode.INVALID_REQUEST, "url", reason)
    body = request.get("body")
    if type(body) is dict:
        return None
    reason = f"body: {wrong_type(body)}" if "body" in request else _missing("body", request)
    return Fault(ErrorCode.INVALID_REQUEST, "body", reason)


def url_fault(url: str, task: Task | None) -> Fault | None:
    serves = TASK_OF_URL.get(url)
    if serves is None:
        return Fault(ErrorCode.UNSUPPORTED_URL, "url", f"url {_url_hint(url)}, found {quote(url)}")
    if task is None or serves == task:
        return None
    reason = f"url {url} does not fit: the served model does not {_DOES[serves]}, its task is {task}"
    # Which tasks a model has is the engine's to say, so this never refuses a whole file.
    return Fault(ErrorCode.UNSUPPORTED_URL, "url", reason, counts_for_strict=False)


def _url_hint(url: str) -> str:
    if "://" in url:
        return "must be a path without a host"
    if "?" in url or "#" in url:
        return "must be a path without a query"
    near = get_close_matches(url[:100], TASK_OF_URL, n=1, cutoff=0.8)
    if near:
        return f"must be exactly one of the supported paths (did you mean {near[0]}?)"
    return f"must be one of {', '.join(TASK_OF_URL)}"


def model_fault(model: Any, served_names: frozenset[str] | None) -> Fault | None:
    if model is None:
        return None
    if type(model) is not str:
        return Fault(ErrorCode.INVALID_REQUEST, "body.model", f"body.model must be a string, got {kind(model)}")
    if served_names is None or model in served_names:
        return None
    served = ", ".join(quote(name, 100) for name in sorted(served_names)[:5])
    reason = f"body.model must be a served name ({served}) or absent, found {quote(model)}"
    return Fault(ErrorCode.MODEL_MISMATCH, "body.model", reason)


def stream_fault(stream: Any) -> Fault | None:
    if stream is None or stream is False:
        return None
    reason = f"body.stream must be false or absent in a batch, found {kind(stream) if stream is not True else 'true'}"
    return Fault(ErrorCode.STREAM_NOT_SUPPORTED, "body.stream", reason)
