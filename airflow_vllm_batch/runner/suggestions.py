"""What to do about a kind of failure, where we know it. One sentence for each code; pure."""

from __future__ import annotations

from airflow_vllm_batch.contract import ErrorCode

_SUGGESTIONS: dict[str, str] = {
    ErrorCode.INVALID_ENCODING: "write the file as UTF-8",
    ErrorCode.INVALID_JSON: "write one JSON object a line, as json.dumps does, without NaN and without line breaks",
    ErrorCode.INVALID_REQUEST: "correct the named field; vllm-batch validate checks a file without an engine",
    ErrorCode.DUPLICATE_CUSTOM_ID: "give every row an id of its own",
    ErrorCode.UNSUPPORTED_METHOD: 'write "method": "POST"',
    ErrorCode.UNSUPPORTED_URL: "use an endpoint that this model serves, or a model that serves this endpoint",
    ErrorCode.MODEL_MISMATCH: "leave body.model out, or serve the model under that name (served_model_names)",
    ErrorCode.STREAM_NOT_SUPPORTED: "leave stream out: a batch row has one whole answer",
    ErrorCode.UNKNOWN_PARAMETER: "correct or remove the parameter; unknown_parameters='warn' lets such rows run",
    ErrorCode.PARAMETER_NOT_ALLOWED: "remove the parameter, or admit it by name with allow_parameters",
    ErrorCode.MEDIA_NOT_ALLOWED: "give media as data: or by https: from a public host",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "raise max_model_len, shorten these prompts, or lower their max_tokens",
    ErrorCode.ENGINE_CRASH: "these rows end the engine itself: look at the attempt's log, and leave them out",
    ErrorCode.TIMEOUT: "raise row_timeout_seconds, or give these rows a max_tokens; a retry runs them again",
    ErrorCode.CONNECTION_LOST: "a retry runs these rows again",
    ErrorCode.RATE_LIMITED: "lower max_in_flight; a retry runs these rows again",
    ErrorCode.SERVER_ERROR: "look at the engine's log; a retry runs these rows again",
    ErrorCode.EXPIRED: "the completion window closed first: give more time, or more GPUs",
    ErrorCode.CANCELLED: "run the batch again to answer the rest",
}


def suggestion(code: str) -> str | None:
    """Return what to do about failures of a code; null where only their message helps."""
    return _SUGGESTIONS.get(code)
