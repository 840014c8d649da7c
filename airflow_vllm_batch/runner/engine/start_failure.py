"""Why an engine did not start, read from its log, and whether the same start can succeed later.

The cause lies in another process and leaves only text, so text is what is matched here, and nowhere else.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class StartFailure(NamedTuple):
    cause: str
    """One line for people."""
    passing: bool
    """Whether the cause may be gone at another try."""
    advice: str | None


class _Known(NamedTuple):
    pattern: re.Pattern[str]
    passing: bool
    advice: str


_KNOWN = (
    _Known(
        re.compile(
            r"Free memory on device .* is less than desired|less than desired .* memory utilization", re.IGNORECASE
        ),
        passing=True,
        advice="another process holds memory on the device; wait for it, or lower gpu_memory_utilization",
    ),
    _Known(
        re.compile(r"NCCL|CUDA initialization|CUDA driver|no CUDA-capable device|cudaErrorDevicesUnavailable|NVML"),
        passing=True,
        advice="the device or its driver was not ready",
    ),
    _Known(
        re.compile(
            r"\b50[0234]\b.*(?:Server Error|Bad Gateway|Unavailable|Gateway Time)|Connection(?:Reset)?Error|timed out"
        ),
        passing=True,
        advice="fetching the weights failed on the way; another try may succeed",
    ),
    _Known(
        re.compile(r"out of memory|No available memory for the cache blocks", re.IGNORECASE),
        passing=False,
        advice="the model does not fit: raise tensor_parallel_size, lower max_model_len, or choose a larger device",
    ),
    _Known(
        re.compile(r"KV cache is needed|larger than the (?:available|maximum number)|max seq len", re.IGNORECASE),
        passing=False,
        advice="the context does not fit into the KV cache: lower max_model_len or raise gpu_memory_utilization",
    ),
)

_EXCEPTION = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)): (.+)$")
_WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore")


def explain(raised: BaseException, log: str) -> StartFailure:
    """Return why a start failed.

    :param raised: what the start raised here; often only "see above".
    :param log: the tail of the engine processes' output.
    """
    cause = _deepest(raised, log)
    searched = f"{cause}\n{log}"
    for known in _KNOWN:
        if known.pattern.search(cause):
            return StartFailure(cause, known.passing, known.advice)
    for known in _KNOWN:
        if known.pattern.search(searched):
            return StartFailure(cause, known.passing, known.advice)
    return StartFailure(cause, passing=False, advice=None)


def _deepest(raised: BaseException, log: str) -> str:
    """Return the innermost exception: of the log where ours only points to it, else of the chain."""
    innermost = raised
    while (deeper := innermost.__cause__ or innermost.__context__) is not None:
        innermost = deeper
    text = f"{type(innermost).__name__}: {_first_line(innermost)}"
    if not any(words in text for words in _WRAPPERS):
        return text
    for line in log.splitlines():
        found = _EXCEPTION.search(line)
        if found and not any(words in found[0] for words in _WRAPPERS):
            return f"{found[1]}: {found[2]}"[:500]
    return text


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line only counts the faults; the third one names the first of them.
    return " ".join(lines[:3])[:500] if lines else "(no message)"
