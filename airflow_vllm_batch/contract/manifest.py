"""The truth about a finished run: written once per try that gets that far, and last."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from airflow_vllm_batch.contract.base import Document, Reported
from airflow_vllm_batch.contract.rows import Outcome


class ManifestState(StrEnum):
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Counts(Reported):
    """Rows per outcome. Every row is accounted for, or there are no counts."""

    rows: int = Field(ge=0)
    by_outcome: dict[Outcome, int]

    @model_validator(mode="after")
    def reconcile(self) -> Self:
        if (seen := sum(self.by_outcome.values())) != self.rows:
            raise ValueError(f"{seen} outcomes for {self.rows} rows: {self.by_outcome}")
        return self

    @property
    def succeeded(self) -> int:
        return self.by_outcome.get(Outcome.SUCCEEDED, 0)

    @property
    def not_succeeded(self) -> int:
        """Rows of ``errors.jsonl``: each of them counts as failed."""
        return self.rows - self.succeeded


class Judgement(Reported):
    """By which threshold a verdict was reached."""

    passed: bool
    allowed_failures: int | float
    """An int is a count, a float a share of the rows."""
    allowed_rows: int
    """The same as a count for this run."""
    failed_rows: int
    reason: str
    judged_at: datetime | None = None
    judged_by: str | None = None
    """``runner``, or who judged it again with another threshold."""


class Verdict(Reported):
    """Pass or fail: of the whole run, of each input with a threshold of its own, and the judgements before it."""

    passed: bool
    overall: Judgement
    per_input: list[Judgement | None] = Field(default_factory=list)
    earlier: list[Judgement] = Field(default_factory=list)


class InputRead(Reported):
    """An input as it was read."""

    uri: str
    """Without its query."""
    size: int | None = None
    """Bytes as stored, compressed ones where the object is compressed."""
    etag: str | None = None
    sha256: str | None = None
    """Of the bytes as stored."""
    lines: int | None = None
    """Physical lines, blank ones included."""


class OutputFile(Reported):
    """One object that holds rows. Readers go through this list, never through names."""

    role: Literal["output", "errors", "all"]
    """``all`` is the one-file form: every row in one object."""
    input: int | None = None
    """Index of the input whose rows it holds; null where it holds those of all inputs."""
    shard: int | None = None
    uri: str
    """Without its query."""
    lines: int
    bytes: int
    etag: str | None = None
    """Null where the target gives none, as after an http(s) PUT."""
    sha256: str
    status: int | None = None
    """Status of the reply to an http(s) PUT."""


class ErrorGroup(Reported):
    """Failures of one cause."""

    code: str
    message: str
    """With numbers and ids masked."""
    count: int
    custom_ids: list[str] = Field(default_factory=list, max_length=5)
    lines: list[int] = Field(default_factory=list, max_length=5)
    """Lines of the examples, for rows without a readable custom_id."""
    suggestion: str | None = None


class Usage(Reported):
    """Tokens. Null where no engine reported them."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    completion_tokens: int = 0
    total_tokens: int = 0


class Answers(Reported):
    """What the succeeded rows look like; rows themselves are never altered."""

    by_finish_reason: dict[str, int] = Field(default_factory=dict)
    empty: int = 0
    not_json: int | None = None
    """Not JSON though the row's ``response_format`` asked for it."""
    schema_mismatch: int | None = None
    """JSON that does not fit the row's own schema."""
    bad_rows: int = 0
    """Rows that are empty, not JSON or a mismatch; with ``bad_answers="fail"`` each counts as failed."""


class Timing(Reported):
    """Seconds. Null where a part did not happen or could not be told."""

    queued: float | None = None
    pull: float | None = None
    stage: float | None = None
    plan: float | None = None
    weights: float | None = None
    warm_up: float | None = None
    engine_start: float | None = None
    """Weights and warm-up together, where the engine does not tell them apart."""
    run: float | None = None
    write: float | None = None
    total: float | None = None


class Throughput(Reported):
    """Over the time in which rows ran in this try."""

    rows_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    completion_tokens_per_second: float | None = None


class TimelinePoint(Reported):
    seconds: float
    """Since the try started."""
    rows_done: int
    rows_in_flight: int | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None


class Histogram(Reported):
    """Counts in buckets of powers of two: bucket ``i`` holds values in ``[base * 2**i, base * 2**(i + 1))``.

    The first bucket also holds what is smaller, the last what is larger.
    """

    unit: str
    base: float
    counts: list[int]


class Histograms(Reported):
    latency: Histogram | None = None
    output_tokens: Histogram | None = None


class ModelIdentity(Reported):
    name: str
    served_names: list[str] = Field(default_factory=list)
    fingerprint: str | None = None
    """Hub commit, or digest of file names, sizes and times: a checkpoint overwritten in place is a new model."""
    adapters: dict[str, str | None] = Field(default_factory=dict)
    """Adapter name to fingerprint."""


class Hardware(Reported):
    gpu_name: str | None = None
    gpu_count: int | None = None
    driver: str | None = None
    cuda: str | None = None
    cpu_count: int | None = None
    node: str | None = None


class Cost(Reported):
    amount: float
    currency: str
    gpu_hour_price: float


class Versions(Reported):
    package: str
    vllm: str | None = None
    python: str | None = None


class Manifest(Document):
    run_key: str
    generation: int = Field(ge=1)
    attempt: int = Field(ge=1)
    epoch: int = 0
    spec_digest: str
    state: ManifestState
    verdict: Verdict
    inputs: list[InputRead]
    outputs: list[OutputFile]
    counts: Counts
    counts_per_input: list[Counts]
    bad_answers_per_input: list[int] = Field(default_factory=list)
    """``answers.bad_rows`` of each input; empty where answers were not looked at."""
    healable_rows: int = 0
    """Failed rows that another try could answer."""
    answers: Answers | None = None
    unknown_parameters: dict[str, int] = Field(default_factory=dict)
    """Body keys that the policy let pass although nobody knows them, with the number of rows."""
    usage: Usage | None = None
    timing: Timing
    throughput: Throughput | None = None
    timeline: list[TimelinePoint] = Field(default_factory=list, max_length=120)
    histograms: Histograms | None = None
    gpu_seconds: float | None = None
    cost: Cost | None = None
    error_groups: list[ErrorGroup] = Field(default_factory=list)
    attempts: int = 1
    """Tries of this generation so far."""
    rows_reused: int = 0
    """Rows whose result an earlier try had left."""
    versions: Versions
    model: ModelIdentity
    seed: int | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    """Engine values in force, as the engine reports them."""
    hardware: Hardware | None = None
    started_at: datetime
    finished_at: datetime

    @model_validator(mode="after")
    def reconcile(self) -> Self:
        """Refuse a manifest whose files do not hold every row exactly once."""
        if len(self.counts_per_input) != len(self.inputs):
            raise ValueError(f"{len(self.counts_per_input)} per-input counts for {len(self.inputs)} inputs")
        if (rows := sum(counts.rows for counts in self.counts_per_input)) != self.counts.rows:
            raise ValueError(f"{rows} rows in the inputs, {self.counts.rows} in all")
        if (lines := sum(output.lines for output in self.outputs)) != self.counts.rows:
            raise ValueError(f"{lines} lines in the outputs for {self.counts.rows} rows")
        return self
