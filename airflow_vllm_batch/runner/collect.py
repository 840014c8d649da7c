"""Make finished rows durable: a line in the local result file at once, an object in storage every few seconds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from airflow_vllm_batch.contract import BatchSpec, Outcome, RunLayout
from airflow_vllm_batch.runner.errors import LocalDiskError
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.plan import Plan
from airflow_vllm_batch.runner.results import Finished, ResultWriter, tokens_of
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.runner.segment_queue import MAX_SEGMENT_BYTES, Guard, SegmentQueue, Submit
from airflow_vllm_batch.runner.segments import (
    Range,
    ResultFile,
    SegmentHeader,
    body_digest,
    digest_rows,
    encode_row,
    pack,
)
from airflow_vllm_batch.storage.base import Store

MIN_FREE_BYTES = 1 << 30
MIN_FREE_SHARE = 0.05
"""While storage is away rows go on until the disk has less than either of these: whichever is smaller."""

DiskUsage = Callable[[Path], tuple[int, int, int]]
"""Total, used and free bytes of the disk of a folder."""


class Collector:
    """Takes every row that ended.

    :param submit: runs a coroutine in the loop that owns ``store`` and returns its future.
    :param spool: where the result file lies.
    """

    def __init__(
        self,
        spec: BatchSpec,
        spec_digest: str,
        attempt: int,
        plan: Plan,
        results: ResultFile,
        state: RunState,
        store: Store,
        submit: Submit,
        *,
        spool: Path,
        patience: Patience,
        may_write: Guard,
        disk_usage: DiskUsage = shutil.disk_usage,
    ) -> None:
        self._spec = spec
        self._spec_digest = spec_digest
        self._attempt = attempt
        self._plan = plan
        self._results = results
        self._state = state
        self._spool = spool
        self._disk_usage = disk_usage
        self._writer = ResultWriter(spec.run_key, spec.generation)
        self._began = False
        layout = RunLayout(spec.generation)
        self._queue = SegmentQueue(
            store,
            submit,
            name_of=lambda number: layout.segment(attempt, number, spec.shard),
            pack=self._pack,
            patience=patience,
            may_write=may_write,
            on_durable=self._count_durable,
            note=state.note,
        )

    def go_on_after(self, sequence: int) -> None:
        """Give segments numbers after this one, where this attempt has put some already."""
        self._queue.sequence = sequence

    @property
    def waiting(self) -> str:
        """What is not in storage yet, for people."""
        return f"{self._queue.waiting_bytes / 1e6:,.1f} MB of finished rows"

    def collect(self, finished: Finished) -> None:
        """Record a row's end. Quick: called between two turns of the engine's loop."""
        job, reply = finished.job, finished.reply
        key = self._plan.key(job.row)
        code = finished.code.value if finished.code else None
        error = None if code is None else (code, finished.message or code)
        line = encode_row(
            input_index=key.input,
            line=key.line,
            custom_id=job.custom_id,
            digest=body_digest(job.endpoint, job.body),
            spec_digest=self._spec_digest,
            outcome=finished.outcome,
            attempts=finished.attempts,
            code=code,
            status_code=reply.status if reply else None,
            epoch=self._spec.epoch,
            result=self._writer.line(key.input, key.line, job.custom_id, reply, error),
        )
        self._began = True
        self._plan.record(job.row, self._results.append(line))
        state = self._state
        if finished.outcome not in {Outcome.EXPIRED, Outcome.CANCELLED}:
            state.rows_answered += 1
        state.by_outcome[finished.outcome] += 1
        if reply is not None and (tokens := tokens_of(reply.body)):
            state.prompt_tokens += tokens.prompt
            state.completion_tokens += tokens.completion
        if error is not None:
            state.error_groups.add(error[0], error[1], job.custom_id, key.line)
        if (
            self._results.open_rows >= self._spec.limits.checkpoint_rows
            or self._results.open_bytes >= MAX_SEGMENT_BYTES
        ):
            self.checkpoint()

    def checkpoint(self) -> None:
        """Hand the open range to storage, if there is anything in it. Returns at once."""
        # Before the first row the open range is the intake's: bad lines and reused rows, which are not put.
        if self._began and self._results.open_rows:
            self._queue.add(self._results.close_range())

    async def checkpoint_for_ever(self) -> None:
        """Make a checkpoint every ``checkpoint_seconds``; raise what ended the puts, or that the disk is full."""
        while True:
            await asyncio.sleep(self._spec.limits.checkpoint_seconds)
            self._queue.raise_failure()
            self.checkpoint()
            self._check_disk()

    async def flush(self) -> None:
        """Make a last checkpoint and wait until everything is in storage.

        :raises OSError: where the local disk is full; also then everything that was finished is in storage.
        """
        try:
            self.checkpoint()
        except OSError:
            self._queue.add(self._results.salvage())
            await self._queue.drain()
            raise
        await self._queue.drain()

    def _check_disk(self) -> None:
        if not self._queue.failing:
            return
        most = self._spec.limits.spool_bytes
        if most is not None and self._queue.waiting_bytes > most:
            raise LocalDiskError(
                f"storage is away and {self.waiting} wait for it, more than spool_bytes={most:,}; "
                "they are put once it is back, then the same command goes on"
            )
        total, _, free = self._disk_usage(self._spool)
        if free < min(MIN_FREE_BYTES, total * MIN_FREE_SHARE):
            raise LocalDiskError(
                f"storage is away, and the disk of {self._spool.parent} where {self.waiting} wait for it has only "
                f"{free / 1e6:,.0f} MB left; they are put once it is back, then the same command goes on"
            )

    def _count_durable(self, rows: int) -> None:
        self._state.rows_durable += rows

    def _pack(self, closed: Range) -> bytes:
        rows = self._results.read(closed)
        header = SegmentHeader(
            run_key=self._spec.run_key,
            generation=self._spec.generation,
            attempt=self._attempt,
            spec_digest=self._spec_digest,
            rows=closed.rows,
            blake2b=digest_rows(rows),
        )
        return pack(header, rows)
