"""What a runner says of itself while it lives. Overwritten in place: may be stale or missing, never the truth."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from airflow_vllm_batch.contract.base import Document
from airflow_vllm_batch.contract.manifest import ErrorGroup, Usage
from airflow_vllm_batch.contract.rows import Outcome


class Phase(StrEnum):
    """In the order in which a run goes through them."""

    PREFLIGHT = "preflight"
    QUEUED = "queued"
    UNSCHEDULABLE = "unschedulable"
    PULLING = "pulling"
    STAGING = "staging"
    PLANNING = "planning"
    LOADING = "loading"
    """The engine reads weights."""
    WARMING = "warming"
    RUNNING = "running"
    MERGING = "merging"
    UPLOADING = "uploading"
    DONE = "done"


class Progress(Document):
    run_key: str
    generation: int = Field(ge=1)
    attempt: int = Field(ge=1)
    shard: int | None = None
    writer_id: str | None = None
    phase: Phase
    phase_since: datetime
    started_at: datetime
    updated_at: datetime
    """The heartbeat: renewed every few seconds by a thread of its own, also while nothing moves."""
    last_event: str | None = None
    """What happened last, in a few words for people."""
    last_event_at: datetime | None = None
    rows: int | None = None
    """Rows in all, invalid ones included; null until the plan has seen the last line."""
    rows_done: int = 0
    """Rows that have an outcome, those of earlier tries included."""
    rows_reused: int = 0
    rows_durable: int = 0
    """Of ``rows_done``: those whose outcome is in storage."""
    rows_in_flight: int = 0
    by_outcome: dict[Outcome, int] = Field(default_factory=dict)
    rows_per_second: float | None = None
    """Over the last minute of running."""
    tokens_per_second: float | None = None
    """Prompt and completion tokens, over the same minute."""
    seconds_left: float | None = None
    usage: Usage | None = None
    error_groups: list[ErrorGroup] = Field(default_factory=list)
    """The most frequent ones, at most five."""
    engine_restarts: int = 0
    stragglers: list[str] = Field(default_factory=list)
    """``custom_id`` of rows in flight for much longer than the others; with shards, their indexes."""
    node: str | None = None
