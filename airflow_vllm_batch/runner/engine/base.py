"""The seam between the runner and whatever answers rows. Knows no vendor, no storage, no schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from airflow_vllm_batch.contract import ErrorCode
from airflow_vllm_batch.contract.manifest import Hardware

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)


class Reply(NamedTuple):
    """An HTTP reply, whether or not HTTP carried it."""

    status: int
    body: bytes
    request_id: str | None = None
    retry_after_seconds: float | None = None


class ConnectionLostError(Exception):
    """The connection broke before a reply came; the engine itself may be well."""


class Refusal(NamedTuple):
    """Why a row must not be sent to this engine."""

    code: ErrorCode
    message: str


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says of itself."""

    served_names: tuple[str, ...]
    endpoints: frozenset[str]
    """Paths it answers, out of :data:`ENDPOINTS`."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together."""
    max_num_seqs: int | None = None
    """Sequences that run at once; the window follows it."""
    version: str | None = None
    """Of vLLM, where it is vLLM."""
    values: dict[str, Any] = field(default_factory=dict)
    """Engine values in force, for log and manifest."""
    hardware: Hardware | None = None


class EngineLog(Protocol):
    """What this process and the engine's processes print, as far as it is still kept."""

    def position(self) -> int:
        """Return where the log ends now."""
        ...

    def since(self, position: int) -> str:
        """Return what was printed since."""
        ...


class EngineStats(NamedTuple):
    """Counters since start; null where the engine does not tell."""

    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    preemptions: int | None = None


class Engine(Protocol):
    """Answers many rows at once. A refusal is a status in the reply, never an exception.

    ``start`` raises ``EngineStartError``; ``send`` raises ``EngineDownError`` where the engine is gone,
    ``ConnectionLostError`` where only this reply is lost, and ``ServerRefusesError`` where everything is refused.
    Cancelling ``send`` aborts the request in the engine.
    """

    async def start(self) -> EngineInfo:
        """Load the model. May block the event loop for as long as that takes."""
        ...

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        """Say whether a row can't be answered; only after ``start``."""
        ...

    async def send(self, endpoint: str, body: bytes) -> Reply:
        """Ask for one answer. ``body`` is one JSON object as the user wrote it."""
        ...

    def stats(self) -> EngineStats: ...

    @property
    def down(self) -> bool:
        """Whether the engine is dead, or was given up, and needs a restart."""
        ...

    def progress_mark(self) -> int | None:
        """Return a number that changes with every token read or written; null where that can't be told.

        An engine that has rows and whose mark stands still for minutes is stuck.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Take a stuck engine for dead: from now on ``send`` raises ``EngineDownError`` until a restart."""
        ...

    async def restart(self) -> None:
        """End whatever is left of the engine and load it again. May block the event loop.

        :raises EngineStartError: where that fails; passing, since the same arguments worked before.
        """
        ...

    async def stop(self) -> None:
        """End every process of the engine; harmless where it never started."""
        ...


def refuse_unserved(info: EngineInfo, endpoint: str) -> Refusal | None:
    """Return why an endpoint is not answered by the engine that started, null where it is."""
    if endpoint in info.endpoints:
        return None
    served = ", ".join(sorted(info.endpoints)) or "none of ours"
    return Refusal(
        ErrorCode.UNSUPPORTED_URL,
        f"url: the model {info.served_names[0] if info.served_names else ''!s} does not serve {endpoint}; "
        f"it serves {served}",
    )
