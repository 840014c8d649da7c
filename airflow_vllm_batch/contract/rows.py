"""What becomes of a row: its outcome, the one list of error codes, and the shapes in which it is stored."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from airflow_vllm_batch.contract.base import Reported


class Outcome(StrEnum):
    """Every input line that is not blank ends in exactly one."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The engine refused or lost it, after the row retries."""
    INVALID = "invalid"
    """Never sent: the line broke a rule."""
    EXPIRED = "expired"
    """The completion window closed first."""
    CANCELLED = "cancelled"


class ErrorCode(StrEnum):
    """Every code that can stand in ``error.code`` of a result row, a preflight fault or a whole-file refusal."""

    # The line itself.
    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    UNSUPPORTED_METHOD = "unsupported_method"
    UNSUPPORTED_URL = "unsupported_url"
    MODEL_MISMATCH = "model_mismatch"
    STREAM_NOT_SUPPORTED = "stream_not_supported"
    UNKNOWN_PARAMETER = "unknown_parameter"
    PARAMETER_NOT_ALLOWED = "parameter_not_allowed"
    MEDIA_NOT_ALLOWED = "media_not_allowed"
    # The engine's word on one request.
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    ENGINE_REJECTED = "engine_rejected"
    # The whole file.
    EMPTY_FILE = "empty_file"
    UNSUPPORTED_FILE = "unsupported_file"
    # What happened to a row that was sent, or could not be any more.
    ENGINE_CRASH = "engine_crash"
    TIMEOUT = "timeout"
    CONNECTION_LOST = "connection_lost"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


HEALABLE_STATUS = frozenset({401, 403, 408, 409, 425, 429})
"""4xx statuses that say nothing about the row itself, so that another try may answer it."""


def is_final(outcome: Outcome, code: str | None, status_code: int | None) -> bool:
    """Whether a later try must keep this result instead of running the row again.

    ``expired`` and ``cancelled`` are final for a retry of the same epoch; the caller drops them for a new one.
    """
    if outcome is not Outcome.FAILED:
        return True
    if code == ErrorCode.ENGINE_CRASH:
        return True
    return status_code is not None and 400 <= status_code < 500 and status_code not in HEALABLE_STATUS


class RowResponse(Reported):
    """OpenAI batch output: the HTTP reply of one request."""

    status_code: int
    request_id: str
    body: Any


class RowError(Reported):
    code: str
    message: str


class ResultRow(Reported):
    """One line of ``output.jsonl`` or ``errors.jsonl``, the OpenAI batch result shape.

    Source: https://platform.openai.com/docs/api-reference/batch/request-output
    """

    id: str
    custom_id: str | None
    """Null only where the input line had none that could be read."""
    response: RowResponse | None
    error: RowError | None


class SegmentRow(Reported):
    """One line of a segment: a finished row with what decides whether a later try may keep it."""

    input: int = Field(ge=0)
    """Index of the input file."""
    line: int = Field(ge=1)
    """Physical line in it; with ``input`` the key of the row."""
    custom_id: str | None
    body_digest: str
    spec_digest: str
    outcome: Outcome
    attempts: int = Field(ge=0)
    """How often the row was sent to the engine in all."""
    code: str | None = None
    """``error.code`` of the result, so that a reader need not parse it."""
    status_code: int | None = None
    """``response.status_code`` of the result."""
    epoch: int = 0
    """The clear that the row belongs to: ``expired`` and ``cancelled`` rows of an older one run again."""
    result: ResultRow
