"""BatchSpec: everything a runner needs to know, without a secret in it."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from airflow_vllm_batch.contract.base import Authored, AuthoredDocument
from airflow_vllm_batch.contract.layout import check_run_key

ANSWER_NEUTRAL_ARGUMENTS = frozenset(
    {
        # memory share
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "cpu_offload_gb",
        "swap_space",
        # batching
        "max_num_seqs",
        "max_num_batched_tokens",
        # parallel sizes
        "tensor_parallel_size",
        "-tp",
        "pipeline_parallel_size",
        "-pp",
        "data_parallel_size",
        "-dp",
        # caches and logs
        "download_dir",
        "enable_prefix_caching",
        "no_enable_prefix_caching",
        "disable_log_stats",
        "enable_log_requests",
        "no_enable_log_requests",
        "max_log_len",
        "uvicorn_log_level",
        "enable_prompt_tokens_details",
    }
)
"""Engine arguments that do not change answers: another value keeps the rows of earlier tries."""


def without_query(uri: str) -> str:
    """Return an http(s) URL without query, fragment and user part, any other URI as it is.

    A signed URL's query is a secret; keys of object stores are literal and may hold ``?`` and ``#``.
    """
    if not uri.startswith(("http://", "https://")):
        return uri
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _refuse_query(value: str) -> str:
    if without_query(value) != value:
        raise ValueError("an http(s) URL stands in a spec without its query; the full URL belongs in the store file")
    return value


PublicUri = Annotated[str, AfterValidator(_refuse_query)]
"""A URI that can be shown: an http(s) URL has neither query nor user part."""


class InputFile(Authored):
    """One input. Its bytes are named by ``uri`` or, where the worker can't read that, by the staged copy."""

    uri: PublicUri
    """As the user gave it, an http(s) URL without its query: the full one is in the store file."""
    store: str = "input"
    """Which entry of the store file opens it."""
    etag: str | None = None
    """Pinned at preflight: another ETag at stage means that the input was replaced."""
    size: int | None = None
    staged: str | None = None
    """Name of the copy below the run folder; then it is read instead of ``uri``."""


class OutputTarget(Authored):
    """Where rows go. ``uri`` names a folder, or one object for all rows (``.jsonl``, http(s) PUT)."""

    uri: PublicUri
    state_uri: PublicUri
    """Folder of manifest.json and ``_vllm_batch/``; the same as ``uri`` but for the one-file form."""
    store: str = "output"
    state_store: str = "output"


class Adapter(Authored):
    name: str
    uri: str
    fingerprint: str | None = None
    base_model_name: str | None = None


class ModelSpec(Authored):
    """``name`` is a hub name, a path or an object-store URI."""

    name: str
    fingerprint: str | None = None
    """Null where only the runner can tell."""
    served_names: tuple[str, ...] = ()
    """What ``body.model`` may say; the model's own name where there is none."""
    adapters: tuple[Adapter, ...] = ()
    revision: str | None = None
    store: str | None = None

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """Every value of ``body.model`` that this run answers."""
        return (*(self.served_names or (self.name,)), *(adapter.name for adapter in self.adapters))


class EngineSpec(Authored):
    kind: Literal["vllm", "server", "echo"] = "vllm"
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """vLLM's own flags, with underscores and without dashes; a short flag keeps its dash (``-tp``)."""
    server_url: str | None = None
    delay_seconds: float = Field(default=0.0, ge=0)
    """Echo only: how long each answer takes."""
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if (self.kind == "server") != (self.server_url is not None):
            raise ValueError("server_url goes with engine kind 'server', and only with it")
        if self.kind != "vllm" and self.args:
            raise ValueError(f"engine arguments {sorted(self.args)} mean nothing to engine kind {self.kind!r}")
        if self.kind != "echo" and self.delay_seconds:
            raise ValueError("delay_seconds goes with engine kind 'echo'")
        return self


class RowPolicy(Authored):
    """Which rows run, and how many may fail."""

    bad_lines: Literal["isolate", "strict"] = "isolate"
    unknown_parameters: Literal["error", "warn", "allow"] = "error"
    allow_parameters: tuple[str, ...] = ()
    allowed_failures: int | float = 0
    """An int is a count, a float a share of the rows: 1 is one row, 1.0 is every row."""
    allowed_failures_per_input: tuple[int | float | None, ...] = ()
    run_anyway: bool = False
    """Start the engine even where invalid rows alone are more than allowed."""
    bad_answers: Literal["count", "fail"] = "count"
    allowed_media_domains: tuple[str, ...] | None = None
    """Null: hosts that resolve to public addresses when the plan is made."""

    @field_validator("allowed_failures", mode="before")
    @classmethod
    def _is_threshold(cls, value: object) -> int | float:
        return check_threshold("allowed_failures", value)

    @field_validator("allowed_failures_per_input", mode="before")
    @classmethod
    def _are_thresholds(cls, value: Any) -> tuple[int | float | None, ...]:
        return tuple(None if item is None else check_threshold("allowed_failures_per_input", item) for item in value)


class Limits(Authored):
    """Bounds of a run. Times are seconds."""

    row_retries: int = Field(default=3, ge=0)
    """How often a row is sent again within one try."""
    row_timeout_seconds: float | None = Field(default=None, gt=0)
    max_in_flight: int | None = Field(default=None, ge=1)
    """Null: from the engine's ``max_num_seqs``."""
    order: Literal["prefix", "input"] = "prefix"
    checkpoint_seconds: float = Field(default=10.0, gt=0)
    checkpoint_rows: int = Field(default=2000, ge=1)
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many rows of each input, for a trial."""
    max_row_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    spool_bytes: int | None = Field(default=None, ge=1)
    """How much of the finished rows may wait on the local disk for storage. Null: until the disk is nearly full."""
    storage_patience_seconds: float = Field(default=1800.0, ge=0)
    """How long storage may be away while finished rows, outputs or the manifest wait for it."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """A lease that does not change for so long is taken over; its holder renews it four times as often."""
    completion_window_seconds: float | None = Field(default=None, gt=0)
    """Counted from the start of the first try of the epoch. Rows without a result then become ``expired``."""
    engine_start_timeout_seconds: float = Field(default=1800.0, gt=0)
    engine_stall_seconds: float = Field(default=600.0, gt=0)
    engine_restarts: int = Field(default=5, ge=0)
    """Restarts in a row without a single row answered."""
    stop_seconds: float = Field(default=30.0, gt=0)


class Pricing(Authored):
    gpu_hour_price: float = Field(ge=0)
    currency: str = "USD"


class BatchSpec(AuthoredDocument):
    """What to run and where to write; one JSON document below the run folder."""

    run_key: str
    generation: int = Field(default=1, ge=1)
    epoch: int = Field(default=0, ge=0)
    attempt: int | None = Field(default=None, ge=1)
    """Taken by whoever starts the try; null: the runner takes the next free number."""
    inputs: tuple[InputFile, ...] = Field(min_length=1)
    output: OutputTarget
    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    policy: RowPolicy = RowPolicy()
    limits: Limits = Limits()
    seed: int | None = None
    """Given to the engine where its arguments name none."""
    shards: int = Field(default=1, ge=1)
    shard: int | None = Field(default=None, ge=0)
    pricing: Pricing | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    """For people: dag, run and task. No part of any decision."""
    reuse_from: str | None = None
    """Reserved: the folder of another run whose finished rows may be taken over."""

    @field_validator("run_key")
    @classmethod
    def _is_run_key(cls, value: str) -> str:
        return check_run_key(value)

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        thresholds = self.policy.allowed_failures_per_input
        if thresholds and len(thresholds) != len(self.inputs):
            raise ValueError(f"{len(thresholds)} entries of allowed_failures_per_input for {len(self.inputs)} inputs")
        if self.shard is not None and self.shard >= self.shards:
            raise ValueError(f"shard {self.shard} of {self.shards}: shards count from 0")
        return self

    def digest(self, fingerprint: str | None = None, adapters: dict[str, str | None] | None = None) -> str:
        """Return the digest of all that decides an answer besides the row itself, 32 hex digits.

        Two tries with the same digest may share rows. It holds the model's fingerprint (its name where there is
        none), the adapters', the engine's kind, every engine argument outside ``ANSWER_NEUTRAL_ARGUMENTS`` and the
        seed; neither thresholds, prices, limits nor places.

        :param fingerprint: of the model, where it was found after the spec was written.
        :param adapters: fingerprints by adapter name, likewise.
        """
        found = adapters or {}
        relevant = {
            "model": fingerprint or self.model.fingerprint or self.model.name,
            "revision": self.model.revision,
            "served_names": list(self.model.accepted_names),
            "adapters": {
                adapter.name: found.get(adapter.name) or adapter.fingerprint or adapter.uri
                for adapter in self.model.adapters
            },
            "engine": self.engine.kind,
            "args": {name: value for name, value in self.engine.args.items() if name not in ANSWER_NEUTRAL_ARGUMENTS},
            "seed": self.seed,
        }
        canonical = json.dumps(relevant, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def check_threshold(name: str, value: object) -> int | float:
    """Return a count or a share of failures; True is neither, though Python calls it 1.

    :raises ValueError: for a bool, another type, a negative count or a share outside 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is a number of rows (int) or a share of them (float), got {value!r}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} as a number of rows can't be negative, got {value}")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} as a share must lie between 0.0 and 1.0, got {value}; a number of rows is an int")
    return value
