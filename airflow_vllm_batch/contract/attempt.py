"""The record of one try: whoever starts it creates the record, the runner or whoever finds it dead completes it."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from airflow_vllm_batch.contract.base import Document
from airflow_vllm_batch.contract.rows import Outcome


class AttemptRecord(Document):
    run_key: str
    generation: int = Field(ge=1)
    number: int = Field(ge=1)
    """The next free number of the generation, not Airflow's try number."""
    shard: int | None = None
    epoch: int = 0
    airflow_try: int | None = None
    started_by: str
    """``operator``, ``cli`` or ``runner``."""
    worker: str | None = None
    """Which kind of worker ran it, such as ``local``."""
    node: str | None = None
    pid: int | None = None
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    """An :class:`ExitCode`, or null while it runs and after a death without one."""
    reason: str | None = None
    """One sentence for people; quotes the deepest exception where there was one."""
    final: bool | None = None
    """Whether another try would end the same way."""
    phase: str | None = None
    """The phase in which it ended."""
    rows: int | None = None
    rows_reused: int | None = None
    by_outcome: dict[Outcome, int] = Field(default_factory=dict)
    spec_digest: str | None = None
    log: str | None = None
    """Name of the log tail below the run folder."""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None
