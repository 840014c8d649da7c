"""stage → plan → engine → schedule → collect → merge: the whole run on one page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from airflow_vllm_batch.contract import BatchSpec, ExitCode, Manifest, OutputFile, Phase
from airflow_vllm_batch.contract.layout import RunLayout, is_one_file
from airflow_vllm_batch.contract.manifest import Timing
from airflow_vllm_batch.runner.collect import Collector
from airflow_vllm_batch.runner.engine.base import Engine, EngineInfo
from airflow_vllm_batch.runner.errors import StoppedError
from airflow_vllm_batch.runner.intake import Intake, open_intake, take_in
from airflow_vllm_batch.runner.io_thread import IoThread
from airflow_vllm_batch.runner.merge import Merged, OutputDraft, merge
from airflow_vllm_batch.runner.reuse import reuse_segments
from airflow_vllm_batch.runner.run_state import RunState, utc_now
from airflow_vllm_batch.runner.schedule import RestartPolicy, RetryPolicy, Scheduler
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.runner.summary import build_manifest
from airflow_vllm_batch.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

LAST_CHECKPOINT_SECONDS = 5.0
"""How long a stop waits for the open segment before rows in flight are aborted."""
DEFAULT_WINDOW = 256
SPARE_ROWS = 1.25
"""The window, as a share of the sequences that run at once: the engine never waits for the next row."""


@dataclass
class Try:
    """One try of a run.

    :param folder: pointed at the spec's generation; used from the storage thread only.
    :param spool: an empty folder on the local disk.
    """

    spec: BatchSpec
    spec_digest: str
    fingerprint: str | None
    attempt: int
    folder: RunFolder
    engine: Engine
    spool: Path
    state: RunState
    stop: StopSignal
    seconds: dict[str, float] = field(default_factory=dict)
    """Part of the run to its seconds, by the names of :class:`Timing`."""


async def run(this: Try) -> tuple[ExitCode, Manifest]:
    """Run everything that is left of a run and write its manifest.

    :raises InputRejectedError: where the input is refused as a whole.
    :raises RunError: engine, server, stop; what was finished is in storage.
    :raises OSError: storage (``StorageError``, ``FileNotFoundError``) or the local disk.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    this.stop.on_request(lambda: loop.call_soon_threadsafe(stopping.set))
    with IoThread() as storage, open_intake(this.spool) as intake:
        try:
            engine_info = await _unless(stopping, _prepare(this, intake, storage), this.stop)
            if engine_info is not None:
                await _run_rows(this, intake, engine_info, storage, stopping)
        finally:
            await this.engine.stop()
        return await _unless(stopping, _finish(this, intake, engine_info, storage), this.stop)


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, ValueT], stop: StopSignal) -> ValueT:
    """Await something that a stop cancels."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise StoppedError(f"stopped: {stop.reason}")
    finally:
        waiter.cancel()
        task.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


async def _prepare(this: Try, intake: Intake, storage: IoThread) -> EngineInfo | None:
    """Bring the input here, plan, and load the engine meanwhile where that is sure to be needed."""
    runnable = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    this.state.enter(Phase.STAGING)
    layout = this.folder.layout
    resumes = await storage.run(_any_segment(this.folder, layout))
    taking_in = asyncio.ensure_future(
        storage.run(
            take_in(
                intake,
                this.spec,
                this.folder,
                this.state,
                on_runnable=lambda: loop.call_soon_threadsafe(runnable.set),
            )
        )
    )
    engine_info: EngineInfo | None = None
    try:
        # A resumed run may have nothing left to ask, and a strict one may be refused at its last line.
        if not resumes and this.spec.policy.bad_lines == "isolate":
            first = asyncio.ensure_future(runnable.wait())
            await asyncio.wait({taking_in, first}, return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if runnable.is_set():
                engine_info = await _start_engine(this)
        await taking_in
    finally:
        taking_in.cancel()
    this.seconds["stage"] = intake.seconds
    if resumes:
        await storage.run(_reuse(this, intake))
    this.seconds["plan"] = max(0.0, time.monotonic() - started - intake.seconds - this.seconds.get("engine_start", 0.0))
    if engine_info is None and intake.plan.count_left():
        engine_info = await _start_engine(this)
    return engine_info


async def _any_segment(folder: RunFolder, layout: RunLayout) -> bool:
    async for _ in folder.store.list(layout.segments):
        return True
    return False


async def _reuse(this: Try, intake: Intake) -> None:
    this.state.enter(Phase.PLANNING)
    found = await reuse_segments(
        this.folder.store,
        this.folder.layout,
        intake.plan,
        intake.results,
        run_key=this.spec.run_key,
        spec_digest=this.spec_digest,
        epoch=this.spec.epoch,
    )
    # Reused rows are in storage already: they open no segment of this try.
    intake.results.close_range()
    this.state.rows_reused = found.rows
    this.state.rows_durable += found.rows
    this.state.by_outcome.update(found.by_outcome)
    log.info("%s", found.describe())
    this.state.note(found.describe())


async def _start_engine(this: Try) -> EngineInfo:
    started = time.monotonic()
    this.state.enter(Phase.LOADING)
    info = await this.engine.start()
    this.seconds["engine_start"] = time.monotonic() - started
    log.info(
        "engine ready after %.1f s: %s",
        this.seconds["engine_start"],
        ", ".join(f"{name}={value}" for name, value in info.values.items() if value is not None),
    )
    return info


async def _run_rows(this: Try, intake: Intake, info: EngineInfo, storage: IoThread, stopping: asyncio.Event) -> None:
    """Send every row that is left. On a stop the open segment is put first, then rows in flight are aborted."""
    state, plan, limits = this.state, intake.plan, this.spec.limits
    collector = Collector(
        this.spec, this.spec_digest, this.attempt, plan, intake.results, state, this.folder.store, storage.submit
    )

    def on_restart(circumstance: str) -> None:
        # What is finished goes to storage first: the load blocks this loop, and may be this process's last deed.
        collector.checkpoint()
        state.engine_restarts += 1
        state.note(f"engine restarted: {circumstance}")
        log.warning("the engine is restarted (%s)", circumstance)

    state.enter(Phase.RUNNING)
    started = time.monotonic()
    scheduler = Scheduler(
        this.engine,
        collector.collect,
        window=limits.max_in_flight or int((info.max_num_seqs or DEFAULT_WINDOW) * SPARE_ROWS),
        retry=RetryPolicy(limits.row_retries, limits.row_timeout_seconds),
        restart=RestartPolicy(limits.engine_restarts, limits.engine_stall_seconds),
        on_in_flight=state.set_in_flight,
        on_restart=on_restart,
    )
    rows = asyncio.ensure_future(scheduler.run(plan.job(index) for index in plan.left()))
    checkpoints = asyncio.ensure_future(collector.checkpoint_for_ever())
    waiter = asyncio.ensure_future(stopping.wait())
    tasks: set[asyncio.Future[Any]] = {rows, checkpoints, waiter}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        checkpoints.cancel()
        try:
            # Before anything else: these rows are paid for.
            async with asyncio.timeout(None if rows.done() else LAST_CHECKPOINT_SECONDS):
                await collector.flush()
        finally:
            stats = this.engine.stats()
            intake.cached_prompt_tokens = stats.cached_prompt_tokens
        if checkpoints.done() and not checkpoints.cancelled():
            checkpoints.result()
        if rows.done():
            rows.result()
        if not rows.done():
            raise StoppedError(f"stopped: {this.stop.reason}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        this.seconds["run"] = time.monotonic() - started


async def _finish(this: Try, intake: Intake, info: EngineInfo | None, storage: IoThread) -> tuple[ExitCode, Manifest]:
    """Merge, upload, and write the manifest last."""
    started = time.monotonic()
    this.state.enter(Phase.MERGING)
    intake.results.close_range()
    one_file = is_one_file(this.spec.output.uri)
    merged = await asyncio.to_thread(
        merge, intake.plan, intake.results, this.spool, one_file=one_file, looks_at_forms=intake.asks_for_forms
    )
    this.state.enter(Phase.UPLOADING)
    outputs = [await storage.run(_upload(this, draft)) for draft in merged.drafts]
    this.seconds["write"] = time.monotonic() - started
    this.seconds["total"] = this.state.seconds
    manifest = await storage.run(_write_manifest(this, intake, info, merged, outputs))
    this.state.enter(Phase.DONE)
    return _exit_code(intake, manifest), manifest


async def _upload(this: Try, draft: OutputDraft) -> OutputFile:
    if draft.role == "all":
        target = this.folder.access.open_target(this.spec.output.uri, this.spec.output.store)
        written = await target.put_file(draft.path)
        uri, etag, status = target.uri, written.etag, written.status
    else:
        name = RunLayout.output if draft.role == "output" else RunLayout.errors
        info = await this.folder.store.put_file(name, draft.path)
        uri, etag, status = this.folder.store.uri(name), info.etag, None
    return OutputFile(
        role=draft.role,
        uri=uri,
        lines=draft.lines,
        bytes=draft.size,
        etag=etag,
        sha256=draft.digest.hexdigest(),
        status=status,
    )


async def _write_manifest(
    this: Try, intake: Intake, info: EngineInfo | None, merged: Merged, outputs: list[OutputFile]
) -> Manifest:
    # A crash before this put leaves outputs that no manifest names: the next try merges and uploads again.
    manifest = build_manifest(
        this.spec,
        spec_digest=this.spec_digest,
        fingerprint=this.fingerprint,
        attempt=this.attempt,
        attempts=len(await this.folder.attempt_numbers()) or 1,
        intake=intake,
        info=info,
        merged=merged,
        outputs=outputs,
        state=this.state,
        timing=Timing(**this.seconds),
        finished_at=utc_now(),
    )
    await this.folder.write_manifest(manifest)
    return manifest


def _exit_code(intake: Intake, manifest: Manifest) -> ExitCode:
    if not intake.runnable:
        return ExitCode.INPUT_REFUSED
    return ExitCode.PASSED if manifest.verdict.passed else ExitCode.TOO_MANY_FAILED
