"""Answers every endpoint without a model, in the shapes that OpenAI and vLLM use, so that a DAG can be tried anywhere.

The answer repeats the end of the prompt: it proves that a row's own text came back under the row's own id.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from airflow_vllm_batch.runner.engine.base import ENDPOINTS, EngineInfo, EngineStats, Refusal, Reply

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

CREATED = 0
"""Echo answers are the same at every run, so they carry no time."""
WINDOW = 256


class EchoEngine:
    """The fake beside the engine protocol; it ships.

    :param served_names: what the answers call the model.
    :param delay_seconds: how long each answer takes.
    """

    def __init__(self, served_names: tuple[str, ...], delay_seconds: float = 0.0) -> None:
        self._names = served_names
        self._delay_seconds = delay_seconds

    async def start(self) -> EngineInfo:
        return EngineInfo(
            served_names=self._names,
            endpoints=frozenset(ENDPOINTS),
            max_num_seqs=WINDOW,
            values={"engine": "echo", "delay_seconds": self._delay_seconds},
        )

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        return None

    async def send(self, endpoint: str, body: bytes) -> Reply:
        # At least one turn of the loop, so that a fast echo can't starve checkpoints and signals.
        await asyncio.sleep(self._delay_seconds)
        request = _decode(body)
        model = request.get("model") or self._names[0]
        return Reply(200, _encode(_ANSWERS[endpoint](request, model)))

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def down(self) -> bool:
        return False

    def progress_mark(self) -> int | None:
        return None

    def give_up(self, reason: str) -> None:
        return None

    async def restart(self) -> None:
        return None

    async def stop(self) -> None:
        return None


def _usage(prompt: str, answer: str = "") -> dict[str, int]:
    prompt_tokens, completion_tokens = len(prompt.split()), len(answer.split())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _text(content: Any) -> str:
    """Return the text of a message's content, a prompt or an input, whatever its shape."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(filter(None, map(_text, content)))
    if isinstance(content, dict):
        return _text(content.get("content") or content.get("text"))
    return ""


def _chat(request: dict[str, Any], model: str) -> dict[str, Any]:
    messages = request.get("messages") or []
    answer = _text(messages[-1]) if messages else ""
    return {
        "id": "chatcmpl-echo",
        "object": "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer},
                "logprobs": None,
                "finish_reason": "stop",
            }
            for index in range(request.get("n") or 1)
        ],
        "usage": _usage(_text(messages), answer),
    }


def _completion(request: dict[str, Any], model: str) -> dict[str, Any]:
    answer = _text(request.get("prompt"))
    return {
        "id": "cmpl-echo",
        "object": "text_completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {"index": index, "text": answer, "logprobs": None, "finish_reason": "stop"}
            for index in range(request.get("n") or 1)
        ],
        "usage": _usage(answer, answer),
    }


def _embedding(request: dict[str, Any], model: str) -> dict[str, Any]:
    given = request.get("input")
    items = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": [float(len(_text(item))), 1.0]}
            for index, item in enumerate(items)
        ],
        "usage": _usage(_text(given)),
    }


def _response(request: dict[str, Any], model: str) -> dict[str, Any]:
    answer = _text(request.get("input"))
    usage = _usage(answer, answer)
    return {
        "id": "resp_echo",
        "object": "response",
        "created_at": CREATED,
        "model": model,
        "status": "completed",
        "output": [
            {
                "id": "msg_echo",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": answer, "annotations": []}],
            }
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _score(request: dict[str, Any], model: str) -> dict[str, Any]:
    texts = request.get("text_2") or request.get("data_2") or request.get("documents") or []
    items = texts if isinstance(texts, list) else [texts]
    return {
        "id": "score-echo",
        "object": "list",
        "created": CREATED,
        "model": model,
        "data": [{"index": index, "object": "score", "score": 1.0} for index, _ in enumerate(items)],
        "usage": _usage(_text(items)),
    }


def _rerank(request: dict[str, Any], model: str) -> dict[str, Any]:
    documents = request.get("documents") or []
    return {
        "id": "rerank-echo",
        "model": model,
        "usage": {"total_tokens": _usage(_text(documents))["total_tokens"]},
        "results": [
            {"index": index, "document": {"text": _text(document)}, "relevance_score": 1.0}
            for index, document in enumerate(documents[: request.get("top_n") or None])
        ],
    }


_ANSWERS = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
    "/v1/responses": _response,
    "/v1/score": _score,
    "/v1/rerank": _rerank,
}
