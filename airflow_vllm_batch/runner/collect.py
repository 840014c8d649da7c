"""Make finished rows durable: a line in the local result file at once, an object in storage every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from airflow_vllm_batch.contract import BatchSpec, RunLayout
from airflow_vllm_batch.runner.plan import Plan
from airflow_vllm_batch.runner.results import Finished, ResultWriter, tokens_of
from airflow_vllm_batch.runner.run_state import RunState
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

log = logging.getLogger(__name__)

MAX_OPEN_BYTES = 32 * 1024 * 1024
"""A segment is closed early at this size: it is compressed in memory."""

Submit = Callable[[Coroutine[Any, Any, None]], "Future[None]"]


class Collector:
    """Takes every row that ended.

    :param submit: runs a coroutine in the loop that owns ``store``, in order, and returns its future.
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
    ) -> None:
        self._spec = spec
        self._spec_digest = spec_digest
        self._attempt = attempt
        self._plan = plan
        self._results = results
        self._state = state
        self._store = store
        self._submit = submit
        self._layout = RunLayout(spec.generation)
        self._writer = ResultWriter(spec.run_key, spec.generation)
        self._sequence = 0
        self._puts: list[Future[None]] = []

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
        self._plan.record(job.row, self._results.append(line))
        state = self._state
        state.rows_answered += 1
        state.by_outcome[finished.outcome] += 1
        if reply is not None and (tokens := tokens_of(reply.body)):
            state.prompt_tokens += tokens.prompt
            state.completion_tokens += tokens.completion
        if error is not None:
            state.error_groups.add(error[0], error[1], job.custom_id, key.line)
        if self._results.open_rows >= self._spec.limits.checkpoint_rows or self._results.open_bytes >= MAX_OPEN_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Hand the open range to storage, if there is anything in it. Returns at once."""
        if not self._results.open_rows:
            return
        closed = self._results.close_range()
        self._sequence += 1
        name = self._layout.segment(self._attempt, self._sequence, self._spec.shard)
        self._puts = [put for put in self._puts if not _succeeded(put)]
        self._puts.append(self._submit(self._put_segment(name, closed)))

    async def checkpoint_for_ever(self) -> None:
        """Make a checkpoint every ``checkpoint_seconds``, and raise what a put raised."""
        while True:
            await asyncio.sleep(self._spec.limits.checkpoint_seconds)
            for put in self._puts:
                if put.done():
                    put.result()
            self.checkpoint()

    async def flush(self) -> None:
        """Make a last checkpoint and wait until everything is in storage."""
        self.checkpoint()
        for put in self._puts:
            await asyncio.wrap_future(put)
        self._puts = []

    async def _put_segment(self, name: str, closed: Range) -> None:
        packed = await asyncio.to_thread(self._pack, closed)
        await self._store.put_new(name, packed)
        # A crash here leaves a segment that progress does not mention; the next try lists segments and reuses its rows.
        self._state.rows_durable += closed.rows

    def _pack(self, closed: Range) -> bytes:
        rows = self._results.read(closed.start, closed.end)
        header = SegmentHeader(
            run_key=self._spec.run_key,
            generation=self._spec.generation,
            attempt=self._attempt,
            spec_digest=self._spec_digest,
            rows=closed.rows,
            blake2b=digest_rows(rows),
        )
        return pack(header, rows)


def _succeeded(put: Future[None]) -> bool:
    return put.done() and not put.cancelled() and put.exception() is None
