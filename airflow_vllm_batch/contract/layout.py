"""Every object name of a run folder, and the small documents that say whose it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from pydantic import Field, field_validator

from airflow_vllm_batch.contract.base import AuthoredDocument, Document

RUN_KEY = re.compile(r"[a-z0-9-]{1,63}")
ONE_FILE_SUFFIX = ".jsonl"
STATE_SUFFIX = ".vllm_batch/"


def check_run_key(run_key: str) -> str:
    """Return the key; raises ValueError where it is no run key (it becomes part of pod names and labels)."""
    if not RUN_KEY.fullmatch(run_key):
        raise ValueError(f"a run key is 1 to 63 characters out of a-z, 0-9 and '-', got {run_key!r}")
    return run_key


def is_one_file(output_uri: str) -> bool:
    """Whether an output names one object for all rows (run_batch's form) instead of a folder."""
    return output_uri.startswith(("http://", "https://")) or output_uri.endswith(ONE_FILE_SUFFIX)


def default_state_uri(output_uri: str) -> str | None:
    """Where the state of a run lies unless the user says so: the folder itself, or one beside the one file.

    Null for an http(s) PUT, below which nothing can be written.
    """
    if output_uri.startswith(("http://", "https://")):
        return None
    if is_one_file(output_uri):
        return output_uri.removesuffix(ONE_FILE_SUFFIX) + STATE_SUFFIX
    return output_uri if output_uri.endswith("/") else output_uri + "/"


@dataclass(frozen=True)
class RunLayout:
    """Names below the state folder of a run (the output folder itself, but for the one-file form).

    :param generation: from 1; a restart writes to a new one, so nothing is deleted or moved.
    """

    generation: int = 1

    output = "output.jsonl"
    errors = "errors.jsonl"
    manifest = "manifest.json"
    private = "_vllm_batch/"
    run = "_vllm_batch/run.json"
    probe_prefix = "_vllm_batch/probe/"

    def __post_init__(self) -> None:
        if self.generation < 1:
            raise ValueError(f"generations count from 1, got {self.generation}")

    @property
    def folder(self) -> str:
        return f"{self.private}{self.generation}/"

    @property
    def spec(self) -> str:
        return f"{self.folder}spec.json"

    @property
    def cancel(self) -> str:
        return f"{self.folder}cancel.json"

    @property
    def segments(self) -> str:
        return f"{self.folder}segments/"

    @property
    def attempts(self) -> str:
        return f"{self.folder}attempts/"

    def lease(self, shard: int | None = None) -> str:
        return f"{self.folder}lease{_shard_suffix(shard)}.json"

    def progress(self, shard: int | None = None) -> str:
        return f"{self.folder}progress{_shard_suffix(shard)}.json"

    def staged_input(self, index: int) -> str:
        return f"{self.folder}input/{index:02d}.jsonl.zst"

    def segment(self, attempt: int, sequence: int, shard: int | None = None) -> str:
        return f"{self.segments}{attempt:02d}-{shard or 0:05d}-{sequence:06d}.jsonl.zst"

    def attempt(self, number: int, shard: int | None = None) -> str:
        return f"{self.attempts}{number:02d}{_shard_suffix(shard)}.json"

    def attempt_log(self, number: int, shard: int | None = None) -> str:
        return f"{self.attempts}{number:02d}{_shard_suffix(shard)}.log.zst"

    def part(self, shard: int) -> str:
        return f"{self.folder}parts/{shard:05d}.json"

    def sharded(self, name: str, shard: int, shards: int) -> str:
        """Return the name of one shard's output, such as ``output-00002-of-00008.jsonl``."""
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{shard:05d}-of-{shards:05d}{dot}{suffix}"

    @staticmethod
    def attempt_number(name: str) -> int | None:
        """Return the number in the name of an attempt record, null where the name is something else."""
        found = re.search(r"/attempts/(\d+)(?:-\d+)?\.json$", f"/{name}")
        return int(found[1]) if found else None

    @staticmethod
    def segment_number(name: str, attempt: int) -> int | None:
        """Return the sequence number in the name of a segment of this attempt, null for any other name."""
        found = re.search(r"/segments/(\d+)-\d+-(\d+)\.jsonl\.zst$", f"/{name}")
        return int(found[2]) if found and int(found[1]) == attempt else None


def _shard_suffix(shard: int | None) -> str:
    return "" if shard is None else f"-{shard:05d}"


class RunOwner(AuthoredDocument):
    """run.json: who owns the folder. Created create-only, replaced only for a new generation or epoch."""

    run_key: str
    generation: int = Field(default=1, ge=1)
    epoch: int = Field(default=0, ge=0)
    """``ti.max_tries``, which a clear changes and a retry does not: a restart happens once per clear."""
    created_at: datetime
    created_by: str
    """``operator`` or ``cli``, with what helps to find the owner: dag, run and task, or host and user."""

    @field_validator("run_key")
    @classmethod
    def _is_run_key(cls, value: str) -> str:
        return check_run_key(value)


class Lease(Document):
    """lease.json: only its holder writes segments and outputs."""

    run_key: str
    generation: int = Field(ge=1)
    writer_id: str
    """Random, one for each process that ever asked for the lease."""
    attempt: int = Field(ge=1)
    renewals: int = 0
    """Counts up with each renewal: a challenger looks for change, and never compares clocks."""
    host: str | None = None
    pid: int | None = None
    process: str | None = None
    """Boot, process namespace, pid and start of the holder: a challenger on the same machine sees its death at once."""
    taken_at: datetime
    renewed_at: datetime
    released_at: datetime | None = None
    """Set by a holder that ends in order, so that the next one need not wait."""


class CancelRequest(AuthoredDocument):
    """cancel.json: asks one attempt to stop; another attempt ignores it."""

    attempt: int = Field(ge=1)
    requested_at: datetime
    requested_by: str
    reason: str | None = None
