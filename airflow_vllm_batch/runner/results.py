"""One row's end: from an engine's reply, or the lack of one, to the line that goes into the output files."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from airflow_vllm_batch.batchfile.encode import encode, one_line
from airflow_vllm_batch.contract import ErrorCode, Outcome
from airflow_vllm_batch.runner.engine.base import Reply

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
"""4xx statuses worth another send; every 5xx is as well."""


class Job(NamedTuple):
    """A row on its way to the engine."""

    row: int
    """Index in the plan."""
    custom_id: str
    endpoint: str
    body: bytes


class Finished(NamedTuple):
    """A row that reached its end."""

    job: Job
    outcome: Outcome
    attempts: int
    code: ErrorCode | None
    message: str | None
    reply: Reply | None
    seconds: float | None
    """From the last send to its reply."""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class Tokens(NamedTuple):
    prompt: int
    completion: int
    cached: int | None


_decode_body = msgspec.json.Decoder(_Body).decode


def tokens_of(body: bytes) -> Tokens | None:
    """Return what a reply says of its tokens; null where it says nothing that can be read.

    Chat, completions, embeddings and scores say ``prompt_tokens``, responses ``input_tokens``, rerank only a total.
    """
    try:
        usage = _decode_body(body).usage
    except msgspec.MsgspecError:
        return None
    if usage is None:
        return None
    completion = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    if prompt is None:
        prompt = usage.total_tokens
    details = usage.prompt_tokens_details or {}
    cached = details.get("cached_tokens")
    return Tokens(prompt or 0, completion or 0, cached if isinstance(cached, int) else None)


def retryable(status: int) -> bool:
    return status in RETRYABLE_STATUS or status >= 500


class _ErrorBody(msgspec.Struct):
    message: str | None = None


class _ErrorReply(msgspec.Struct):
    error: _ErrorBody | None = None
    message: str | None = None


_decode_error = msgspec.json.Decoder(_ErrorReply).decode


def refusal_of(reply: Reply) -> tuple[ErrorCode, str]:
    """Return code and message of a reply that is no success."""
    try:
        parsed = _decode_error(reply.body)
        message = (parsed.error.message if parsed.error else None) or parsed.message
    except msgspec.MsgspecError:
        message = None
    message = message or f"the engine replied with status {reply.status} and no message"
    if reply.status == 429:
        return ErrorCode.RATE_LIMITED, message
    if reply.status == 408:
        return ErrorCode.TIMEOUT, message
    if reply.status >= 500:
        return ErrorCode.SERVER_ERROR, message
    # vLLM and OpenAI share the words, not the members: vLLM names no code for it.
    if "maximum context length" in message or "max_model_len" in message:
        return ErrorCode.CONTEXT_LENGTH_EXCEEDED, message
    return ErrorCode.ENGINE_REJECTED, message


class ResultWriter:
    """Writes result lines in the OpenAI batch shape.

    :param run_key: with generation, input and line it makes the ``id`` of a result: the same row has the same one.
    """

    def __init__(self, run_key: str, generation: int) -> None:
        self._seed = f"{generation}\0{run_key}".encode()

    def row_id(self, input_index: int, line: int) -> str:
        digest = hashlib.blake2b(f"{input_index}\0{line}".encode(), key=self._seed[:64], digest_size=16)
        return digest.hexdigest()

    def line(
        self,
        input_index: int,
        line: int,
        custom_id: str | None,
        reply: Reply | None,
        error: tuple[str, str] | None,
    ) -> bytes:
        """Return one JSON line without its line end.

        :param reply: null where the row was never answered.
        :param error: code and message; null for a success.
        """
        row_id = self.row_id(input_index, line)
        if reply is None:
            response = b"null"
        else:
            request_id = encode(reply.request_id or f"req-{row_id}")
            response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (reply.status, request_id, _body(reply))
        error_json = b"null" if error is None else b'{"code":%s,"message":%s}' % (encode(error[0]), encode(error[1]))
        id_json = b"null" if custom_id is None else encode(custom_id)
        return b'{"id":"vllm-%s","custom_id":%s,"response":%s,"error":%s}' % (
            row_id.encode(),
            id_json,
            response,
            error_json,
        )


def _body(reply: Reply) -> bytes:
    """Return a reply's body as one line of JSON; what is no JSON becomes a JSON string, so that nothing is lost."""
    try:
        return one_line(reply.body)
    except ValueError:
        return encode(reply.body.decode("utf-8", "replace"))
