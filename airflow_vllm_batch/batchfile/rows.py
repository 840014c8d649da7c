"""What a line of a batch file becomes: a row that can run, or a bad row with its fault. Knows no rule itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

import msgspec

from airflow_vllm_batch.contract import BatchSpec, ErrorCode

Task: TypeAlias = Literal["generate", "embed", "score"]


class Fault(NamedTuple):
    """Why a line can't run. The message never holds prompt text, a secret or a control character."""

    code: ErrorCode
    field: str | None
    """The member that is wrong, such as ``body.messages[2].content``; None where the line as a whole is."""
    message: str
    counts_for_strict: bool = True
    """False for what is the engine's to decide and merely foreseen here; it never refuses a whole file."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """A line that may be handed to the engine."""

    line: int
    custom_id: str
    url: str
    body: bytes
    """The JSON text of the body exactly as it stands in the line."""
    model: str | None
    """``body.model``; None where the served model is meant."""
    extra: bytes | None
    """A JSON object of the foreign members beside body, their values' text unchanged; None where there are none."""


class BadRow(NamedTuple):
    line: int
    custom_id: str | None
    """None where the line has no usable one."""
    fault: Fault


@dataclass(frozen=True, slots=True)
class Rules:
    """What a row is checked against, besides the file format itself."""

    served_names: frozenset[str] | None = None
    """What ``body.model`` may say; None: not known yet, so it isn't checked."""
    task: Task | None = None
    """What the model can do; None: not known, so every endpoint is admitted."""
    unknown_parameters: Literal["error", "warn", "allow"] = "error"
    allow_parameters: frozenset[str] = frozenset()
    """Body parameters that are admitted though they are refused by name or not known."""
    max_row_bytes: int = 32 * 1024 * 1024
    allowed_media_domains: tuple[str, ...] | None = None
    """The only hosts that media may come from; None: every host that is not a private one by its name."""

    @classmethod
    def of(cls, spec: BatchSpec) -> Self:
        """Return what a spec asks of every row; the same on both sides."""
        return cls(
            served_names=frozenset(spec.model.accepted_names),
            unknown_parameters=spec.policy.unknown_parameters,
            allow_parameters=frozenset(spec.policy.allow_parameters),
            max_row_bytes=spec.limits.max_row_bytes,
            allowed_media_domains=spec.policy.allowed_media_domains,
        )
