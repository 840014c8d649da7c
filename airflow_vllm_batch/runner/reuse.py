"""Take over what earlier tries left: rows whose result is final and whose question is the same."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from airflow_vllm_batch.contract import Outcome, RunLayout
from airflow_vllm_batch.contract.rows import is_final
from airflow_vllm_batch.runner.plan import Plan, RowKey
from airflow_vllm_batch.runner.segments import (
    BadSegmentError,
    ResultFile,
    StoredRow,
    body_digest,
    decode_row,
    unpack,
)
from airflow_vllm_batch.storage.base import Store

log = logging.getLogger(__name__)


@dataclass
class Reuse:
    """What was found in the segments of earlier tries."""

    rows: int = 0
    by_outcome: Counter[Outcome] = field(default_factory=Counter)
    not_used: Counter[str] = field(default_factory=Counter)
    """Reason to number of rows."""
    set_aside: dict[str, str] = field(default_factory=dict)
    """Name of a segment that can't be used, to why."""
    sequence: int = 0
    """The highest number of a segment that this attempt has put already: a process may be started anew under it."""

    def describe(self) -> str:
        parts = [f"{self.rows:,} rows of earlier tries are kept"]
        parts += [f"{count:,} run again because {reason}" for reason, count in sorted(self.not_used.items())]
        if self.set_aside:
            parts.append(f"{len(self.set_aside)} damaged or foreign segments are set aside")
        return "; ".join(parts)


async def reuse_segments(
    store: Store,
    layout: RunLayout,
    plan: Plan,
    results: ResultFile,
    *,
    run_key: str,
    spec_digest: str,
    epoch: int,
    attempt: int,
) -> Reuse:
    """Record in the plan every row that need not run again, and append its line to the result file.

    The newest segment has the first word: of two results of one row the later one counts.

    :raises StorageError: where a segment that is listed can't be read; its rows would else be paid for twice.
    """
    found = Reuse()
    names = [info.name async for info in store.list(layout.segments)]
    of_this_attempt = (RunLayout.segment_number(name, attempt) for name in names)
    found.sequence = max((number for number in of_this_attempt if number is not None), default=0)
    for name in reversed(names):
        try:
            header, rows = unpack(await store.get(name))
            if header.run_key != run_key:
                raise BadSegmentError(f"it belongs to the run {header.run_key}")
        except BadSegmentError as error:
            found.set_aside[name] = str(error)
            log.warning("segment %s is set aside: %s", name, error)
            continue
        for raw in rows.split(b"\n")[:-1]:
            _reuse_row(raw + b"\n", decode_row(raw), plan, results, found, spec_digest, epoch)
    return found


def _reuse_row(
    raw: bytes, row: StoredRow, plan: Plan, results: ResultFile, found: Reuse, spec_digest: str, epoch: int
) -> None:
    index = plan.find(RowKey(row.input, row.line))
    if index is None:
        found.not_used["the input has no such line any more"] += 1
        return
    if plan.result(index) is not None:
        return  # a newer segment has it, or the line is refused now
    if (reason := _why_not(row, plan, index, spec_digest, epoch)) is not None:
        found.not_used[reason] += 1
        return
    plan.record(index, results.append(raw, hold=False))
    found.rows += 1
    found.by_outcome[Outcome(row.outcome)] += 1


def _why_not(row: StoredRow, plan: Plan, index: int, spec_digest: str, epoch: int) -> str | None:
    if row.spec_digest != spec_digest:
        return "the model or an engine argument is another one now"
    outcome = Outcome(row.outcome)
    if outcome in {Outcome.EXPIRED, Outcome.CANCELLED} and row.epoch != epoch:
        return f"they were {outcome} in an earlier run"
    if not is_final(outcome, row.code, row.status_code):
        return "they failed for a cause that may have passed"
    job = plan.job(index)
    if job.custom_id != row.custom_id or body_digest(job.endpoint, job.body) != row.body_digest:
        return "their line in the input is another one now"
    return None
