"""stage → plan → engine → schedule → collect → merge: the whole run on one page."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from airflow_vllm_batch.contract import BatchSpec, ExitCode, Manifest, OutputFile, Phase
from airflow_vllm_batch.contract.layout import RunLayout, is_one_file
from airflow_vllm_batch.contract.manifest import Timing
from airflow_vllm_batch.runner.closing import Closing
from airflow_vllm_batch.runner.collect import Collector, DiskUsage
from airflow_vllm_batch.runner.engine.base import Engine, EngineInfo
from airflow_vllm_batch.runner.errors import RunError, StoppedError
from airflow_vllm_batch.runner.intake import Intake, open_intake, take_in
from airflow_vllm_batch.runner.io_thread import IoThread
from airflow_vllm_batch.runner.merge import Merged, OutputDraft, merge
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.reuse import reuse_segments
from airflow_vllm_batch.runner.run_state import RunState, utc_now
from airflow_vllm_batch.runner.schedule import RestartPolicy, RetryPolicy, Scheduler
from airflow_vllm_batch.runner.segment_queue import Guard
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.runner.summary import build_manifest
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.fingerprint import Fingerprints
from airflow_vllm_batch.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

LAST_CHECKPOINT_SECONDS = 5.0
"""How long a stop waits for the open segment before rows in flight are aborted."""
DEFAULT_WINDOW = 256
ROWS_A_TURN = 500
"""How many rows are closed before the event loop gets a turn."""
SPARE_ROWS = 1.25
"""The window, as a share of the sequences that run at once: the engine never waits for the next row."""


async def _always() -> None:
    """Let everything be written."""


async def _here_already() -> None:
    """Leave the model where it is."""


@dataclass
class Try:
    """One try of a run.

    :param folder: pointed at the spec's generation; used from the storage thread only.
    :param spool: an empty folder on the local disk.
    """

    spec: BatchSpec
    spec_digest: str
    fingerprints: Fingerprints
    attempt: int
    folder: RunFolder
    engine: Engine
    spool: Path
    state: RunState
    stop: StopSignal
    closing: Closing = field(default_factory=Closing)
    patience: Patience = field(default_factory=Patience)
    may_write: Guard = _always
    """Asked before each segment, output and manifest."""
    bring_model: Callable[[], Awaitable[None]] = _here_already
    """Brings the model to this machine, where the engine can't load it from where it lies."""
    disk_usage: DiskUsage = shutil.disk_usage
    seconds: dict[str, float] = field(default_factory=dict)
    """Part of the run to its seconds, by the names of :class:`Timing`."""


async def run(this: Try) -> tuple[ExitCode, Manifest]:
    """Run everything that is left of a run and write its manifest.

    :raises InputRejectedError: where the input is refused as a whole.
    :raises RunError: engine, server, stop; what was finished is in storage.
    :raises OSError: storage (``StorageError``, ``FileNotFoundError``) or the local disk.
    :raises LeaseLostError: where another runner took over; nothing is written any more.
    """
    stopping, closing = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    this.stop.on_request(lambda: loop.call_soon_threadsafe(stopping.set))
    this.closing.on_request(lambda: loop.call_soon_threadsafe(closing.set))
    engine_info: EngineInfo | None = None
    with IoThread() as storage, open_intake(this.spool) as intake:
        collector = _collector(this, intake, storage)
        try:
            try:
                engine_info = await _unless(stopping, _prepare(this, intake, collector, storage, closing), this.stop)
                if engine_info is not None:
                    await _run_rows(this, intake, engine_info, collector, stopping, closing)
            finally:
                await this.engine.stop()
            return await _unless(stopping, _finish(this, intake, engine_info, collector, storage), this.stop)
        except StoppedError:
            await _put_what_is_finished(this, collector)
            raise
        except (RunError, OSError):
            # Without the engine: storage may be away for long, and these rows are paid for.
            await _unless(stopping, collector.flush(), this.stop)
            raise


def _collector(this: Try, intake: Intake, storage: IoThread) -> Collector:
    return Collector(
        this.spec,
        this.spec_digest,
        this.attempt,
        intake.plan,
        intake.results,
        this.state,
        this.folder.store,
        storage.submit,
        spool=this.spool,
        patience=this.patience,
        may_write=this.may_write,
        disk_usage=this.disk_usage,
    )


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


async def _prepare(
    this: Try, intake: Intake, collector: Collector, storage: IoThread, closing: asyncio.Event
) -> EngineInfo | None:
    """Bring the input here, plan, and load the engine meanwhile where that is sure to be needed.

    Returns null where no engine is needed: nothing is left to ask, or the run is to end early.
    """
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
                engine_info = await _engine_unless_closed(this, closing)
        await taking_in
    finally:
        taking_in.cancel()
    this.seconds["stage"] = intake.seconds
    if resumes:
        collector.go_on_after(await storage.run(_reuse(this, intake)))
    this.seconds["plan"] = max(0.0, time.monotonic() - started - intake.seconds - this.seconds.get("engine_start", 0.0))
    if engine_info is None and intake.plan.count_left():
        engine_info = await _engine_unless_closed(this, closing)
    return engine_info


async def _engine_unless_closed(this: Try, closing: asyncio.Event) -> EngineInfo | None:
    """Start the engine; null where the run is to end early. An engine that blocks this loop is loaded first."""
    if closing.is_set():
        return None
    starting = asyncio.ensure_future(_start_engine(this))
    waiter = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait({starting, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        waiter.cancel()
        starting.cancel()
        await asyncio.gather(starting, waiter, return_exceptions=True)


async def _any_segment(folder: RunFolder, layout: RunLayout) -> bool:
    async for _ in folder.store.list(layout.segments):
        return True
    return False


async def _reuse(this: Try, intake: Intake) -> int:
    """Take over finished rows; returns the number of the last segment of this attempt."""
    this.state.enter(Phase.PLANNING)
    found = await reuse_segments(
        this.folder.store,
        this.folder.layout,
        intake.plan,
        intake.results,
        run_key=this.spec.run_key,
        spec_digest=this.spec_digest,
        epoch=this.spec.epoch,
        attempt=this.attempt,
    )
    # Reused rows are in storage already: they open no segment of this try.
    intake.results.close_range()
    this.state.rows_reused = found.rows
    this.state.rows_durable += found.rows
    this.state.by_outcome.update(found.by_outcome)
    log.info("%s", found.describe())
    this.state.note(found.describe())
    return found.sequence


async def _start_engine(this: Try) -> EngineInfo:
    started = time.monotonic()
    this.state.enter(Phase.LOADING)
    await this.bring_model()
    info = await this.engine.start()
    this.seconds["engine_start"] = time.monotonic() - started
    log.info(
        "engine ready after %.1f s: %s",
        this.seconds["engine_start"],
        ", ".join(f"{name}={value}" for name, value in info.values.items() if value is not None),
    )
    return info


async def _run_rows(
    this: Try,
    intake: Intake,
    info: EngineInfo,
    collector: Collector,
    stopping: asyncio.Event,
    closing: asyncio.Event,
) -> None:
    """Send every row that is left. On a stop the open segment is put first, then rows in flight are aborted."""
    state, plan, limits = this.state, intake.plan, this.spec.limits

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
    rows = asyncio.ensure_future(scheduler.run(plan.job(row) for row in intake.order if plan.result(row) is None))
    checkpoints = asyncio.ensure_future(collector.checkpoint_for_ever())
    stopped, closed = asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(closing.wait())
    tasks: set[asyncio.Future[Any]] = {rows, checkpoints, stopped, closed}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        intake.cached_prompt_tokens = this.engine.stats().cached_prompt_tokens
        for ended in (rows, checkpoints):
            if ended.done():
                ended.result()
        if stopped.done() and not rows.done():
            await _put_what_is_finished(this, collector)
            raise StoppedError(f"stopped: {this.stop.reason}")
        collector.checkpoint()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        this.seconds["run"] = time.monotonic() - started


async def _put_what_is_finished(this: Try, collector: Collector) -> None:
    """Put the open segment before anything else of a stop: its rows are paid for."""
    try:
        async with asyncio.timeout(LAST_CHECKPOINT_SECONDS):
            await collector.flush()
    except TimeoutError:
        raise StoppedError(
            f"stopped: {this.stop.reason}; {collector.waiting} could not be put within {LAST_CHECKPOINT_SECONDS:g} s, "
            "so they run again"
        ) from None


async def _finish(
    this: Try, intake: Intake, info: EngineInfo | None, collector: Collector, storage: IoThread
) -> tuple[ExitCode, Manifest]:
    """Give rows that are left their outcome where the run ends early, merge, upload, and write the manifest last."""
    started = time.monotonic()
    if this.closing.requested:
        await _close_rows_left(this, intake, collector)
    await collector.flush()
    this.state.enter(Phase.MERGING)
    intake.results.close_range()
    one_file = is_one_file(this.spec.output.uri)
    merged = await asyncio.to_thread(
        merge, intake.plan, intake.results, this.spool, one_file=one_file, looks_at_forms=intake.asks_for_forms
    )
    this.state.enter(Phase.UPLOADING)
    outputs = [await storage.run(_persist(this, _upload(this, draft))) for draft in merged.drafts]
    this.seconds["write"] = time.monotonic() - started
    this.seconds["total"] = this.state.seconds
    manifest = await storage.run(_write_manifest(this, intake, info, merged, outputs))
    this.state.enter(Phase.DONE)
    return _exit_code(intake, manifest), manifest


async def _close_rows_left(this: Try, intake: Intake, collector: Collector) -> None:
    """Write every row without a result as expired or cancelled, also to segments: a retry must find it final."""
    this.state.note(this.closing.message)
    for count, index in enumerate(intake.plan.left()):
        collector.collect(this.closing.end_of(intake.plan.job(index)))
        if count % ROWS_A_TURN == 0:
            await asyncio.sleep(0)


def _upload(this: Try, draft: OutputDraft) -> Callable[[], Awaitable[OutputFile]]:
    async def upload() -> OutputFile:
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

    return upload


async def _persist(this: Try, write: Callable[[], Awaitable[ValueT]]) -> ValueT:
    """Write under the lease, as often as it takes while storage is away. Every row is in a segment by now."""
    patience = this.patience
    if this.spec.output.uri.startswith(("http://", "https://")):
        # A URL that is refused is not renewed here, and the next try uploads without an engine.
        patience = replace(patience, refused_seconds=0.0)

    async def under_lease() -> ValueT:
        await this.may_write()
        return await write()

    try:
        return await patience.keep_trying(under_lease, on_failure=lambda error: log.warning("tried again: %s", error))
    except StorageError as error:
        raise StorageError(
            f"{error}. Every row is finished and kept in {this.folder.output.state_uri}: run the same command again "
            "(with a fresh URL where a signed one was refused), which uploads without starting an engine"
        ) from error


async def _write_manifest(
    this: Try, intake: Intake, info: EngineInfo | None, merged: Merged, outputs: list[OutputFile]
) -> Manifest:
    async def write() -> Manifest:
        manifest = build_manifest(
            this.spec,
            spec_digest=this.spec_digest,
            fingerprints=this.fingerprints,
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
        # A crash before this put leaves outputs that no manifest names: the next try merges and uploads again.
        await this.folder.write_manifest(manifest)
        return manifest

    return await _persist(this, write)


def _exit_code(intake: Intake, manifest: Manifest) -> ExitCode:
    if not intake.runnable:
        return ExitCode.INPUT_REFUSED
    return ExitCode.PASSED if manifest.verdict.passed else ExitCode.TOO_MANY_FAILED
