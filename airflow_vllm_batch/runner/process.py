"""One runner process around one try: log tail, heartbeat, attempt record, and the exit code for every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from airflow_vllm_batch import __version__
from airflow_vllm_batch.batchfile.reader import InputRejectedError
from airflow_vllm_batch.contract import AttemptRecord, BatchSpec, ExitCode, Manifest, Phase
from airflow_vllm_batch.runner.closing import CloseWatch, Closing
from airflow_vllm_batch.runner.engine.base import Engine
from airflow_vllm_batch.runner.engine.echo_engine import EchoEngine
from airflow_vllm_batch.runner.engine.server_engine import ServerEngine
from airflow_vllm_batch.runner.engine.vllm_engine import VLLMEngine
from airflow_vllm_batch.runner.errors import EngineStartError, RunError
from airflow_vllm_batch.runner.holding import Holding
from airflow_vllm_batch.runner.log_tail import LogTail
from airflow_vllm_batch.runner.model_cache import Copy, Fetcher, cache_root, local_names, look_up
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.pipeline import Try, run
from airflow_vllm_batch.runner.reporting import Display, Heartbeat, choose_display
from airflow_vllm_batch.runner.run_state import RunState, utc_now
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.runner.spool import open_spool
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectNameError, StorageError
from airflow_vllm_batch.storage.compression import CorruptStreamError, compress
from airflow_vllm_batch.storage.fingerprint import Fingerprints, fingerprints_of, names_a_path
from airflow_vllm_batch.storage.lease import LeaseHeldError, LeaseLostError
from airflow_vllm_batch.storage.model_objects import with_fingerprints
from airflow_vllm_batch.storage.run_folder import FolderTakenError, RunFolder
from airflow_vllm_batch.storage.settings import StoreSettingsError

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

BEAT_STORAGE_SECONDS = 10.0
"""The heartbeat looks for stops and cancel requests too: a store that is away must not keep it for long."""
LOADING_STOP_SECONDS = 3.0
"""A stop while the engine loads is not heard by the event loop; nothing is open then, so the process just ends."""


class End(NamedTuple):
    """How the process ends."""

    exit_code: ExitCode
    reason: str
    manifest: Manifest | None = None


def run_spec(spec: BatchSpec, access: Access, stop: StopSignal, *, started_by: str) -> End:
    """Run a spec to its end and leave a complete attempt record, whatever happens.

    :param spec: its run folder must be claimed; without ``attempt`` the next free number is taken.
    """
    with LogTail() as tail:
        _log_to_stderr()
        state = RunState(spec.run_key, spec.generation, spec.attempt or 1, spec.shard, socket.gethostname())
        try:
            folder = RunFolder(access, spec.output)
            folder.at_generation(spec.generation)
            attempt = spec.attempt or asyncio.run(_start_attempt(folder, spec, started_by))
        except Exception as error:  # noqa: BLE001  becomes the exit code
            return _end_of(error)
        state.attempt = attempt

        def finish(end: End) -> None:
            _complete(folder, spec, attempt, state, end, tail.text(access.secrets()))

        with Holding(folder, spec, attempt, state, stop) as lease:
            # An operator's next try waits for its predecessor; a person wants to know that somebody else is at it.
            waits_on = started_by != "cli"
            end = _run_guarded(spec, folder, attempt, access, state, stop, tail, lease, finish, waits_on=waits_on)
            finish(end)
        log.info("runner ends with exit code %s: %s", ExitCode.describe(end.exit_code), end.reason)
    return end


def _run_guarded(
    spec: BatchSpec,
    folder: RunFolder,
    attempt: int,
    access: Access,
    state: RunState,
    stop: StopSignal,
    tail: LogTail,
    lease: Holding,
    finish: Callable[[End], None],
    *,
    waits_on: bool,
) -> End:
    closing = Closing()
    watch = CloseWatch(closing, attempt)

    def leave(words: str) -> None:
        end = End(ExitCode.HELD, lease.lost) if lease.lost else End(ExitCode.RESUMABLE, f"{words}: {stop.reason}")
        _leave_at_once(end, finish, lease.release)

    def on_beat() -> None:
        if state.phase is Phase.LOADING and stop.requested_at is not None:
            if time.monotonic() - stop.requested_at >= LOADING_STOP_SECONDS:
                leave("stopped while the engine was loading")
        elif stop.requested_at is not None and time.monotonic() - stop.requested_at > spec.limits.stop_seconds:
            leave("stopped, but not in order")
        elif state.phase is Phase.LOADING:
            # A model that is being fetched says so: the engine's own time begins after that.
            since = max(state.phase_since, state.last_event_at or state.phase_since)
            loading = (utc_now() - since).total_seconds()
            if loading > spec.limits.engine_start_timeout_seconds:
                stop.request(f"loading for {loading:.0f} s, engine_start_timeout_seconds is over")
        watch.look(lambda: _at_once(folder.read_cancel()))

    def put_progress(raw: bytes) -> None:
        if lease.may_report:
            _at_once(folder.store.put(folder.layout.progress(spec.shard), raw))

    display: Display = choose_display(tail.terminal, time.monotonic)
    with Heartbeat(state, put_progress, display, on_beat=on_beat), open_spool() as spool:
        try:
            log.info(
                "airflow-provider-vllm-batch %s, run %s, attempt %d, model %s",
                __version__,
                spec.run_key,
                attempt,
                spec.model.name,
            )
            lease.acquire(waits_on=waits_on)
            asyncio.run(_follow(folder, spec, attempt, state, watch))
            copies = asyncio.run(look_up(spec, access, cache_root()))
            fingerprints = _fingerprints(
                with_fingerprints(spec, {uri: copy.fingerprint for uri, copy in copies.items()})
            )
            patience = Patience(spec.limits.storage_patience_seconds)
            fetcher = Fetcher(state.note, patience)
            this = Try(
                spec=spec,
                spec_digest=spec.digest(fingerprints.model, fingerprints.adapters),
                fingerprints=fingerprints,
                attempt=attempt,
                folder=folder,
                engine=_engine(spec, copies, access, tail),
                spool=spool,
                state=state,
                stop=stop,
                closing=closing,
                patience=patience,
                may_write=lease.confirm,
                bring_model=lambda: fetcher.bring_all(copies.values()),
            )
            return _end_with(*_run_loop(run(this)))
        except Exception as error:  # noqa: BLE001  becomes the exit code
            # Whatever a runner dies of that was overtaken: another one goes on.
            return End(ExitCode.HELD, lease.lost) if lease.lost else _end_of(error)


def _end_with(exit_code: ExitCode, manifest: Manifest) -> End:
    reason = manifest.verdict.overall.reason
    if exit_code is ExitCode.INPUT_REFUSED:
        reason = f"no line of the input can run; {reason}"
    return End(exit_code, reason, manifest)


async def _follow(folder: RunFolder, spec: BatchSpec, attempt: int, state: RunState, watch: CloseWatch) -> None:
    """Take up the run where earlier tries left it: their records are completed, their time counts."""
    try:
        await folder.record_deaths(before=attempt, shard=spec.shard, now=utc_now())
    except (StorageError, ValueError) as error:
        log.warning("the end of an earlier attempt can't be recorded: %s", error)
    if spec.limits.completion_window_seconds is not None:
        began_at = await folder.epoch_began_at(spec.epoch, spec.shard) or state.started_at
        watch.open_window(spec.limits.completion_window_seconds, began_at=began_at, now=utc_now())


def _at_once(work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Do a small thing with storage from the heartbeat's thread; ``TimeoutError`` where that takes too long."""

    async def bounded() -> ValueT:
        async with asyncio.timeout(BEAT_STORAGE_SECONDS):
            return await work

    return asyncio.run(bounded())


def _run_loop(work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Run the main loop: on uvloop where vLLM brought it, which takes a little less of the CPU for each row."""
    factory = importlib.import_module("uvloop").new_event_loop if find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _fingerprints(spec: BatchSpec) -> Fingerprints:
    found = fingerprints_of(spec)
    if spec.engine.kind == "vllm":
        for name, fingerprint in {spec.model.name: found.model, **_adapter_places(spec, found)}.items():
            if fingerprint is None and names_a_path(name):
                raise EngineStartError(f"{name!r} is not there: no such file or folder", passing=False)
    return found


def _adapter_places(spec: BatchSpec, found: Fingerprints) -> dict[str, str | None]:
    return {adapter.uri: found.adapters[adapter.name] for adapter in spec.model.adapters}


def _engine(spec: BatchSpec, copies: Mapping[str, Copy], access: Access, tail: LogTail) -> Engine:
    match spec.engine.kind:
        case "echo":
            return EchoEngine(spec.model.accepted_names, spec.engine.delay_seconds)
        case "server":

            def headers() -> dict[str, str]:
                server = access.server
                named = {name: value.get_secret_value() for name, value in server.headers.items()}
                key = server.api_key.get_secret_value() if server.api_key else None
                return {**named, "Authorization": f"Bearer {key}"} if key else named

            return ServerEngine(spec.engine.server_url or "", spec.model.accepted_names[0], headers)
        case "vllm":
            model, args = local_names(spec.model, spec.engine.args, copies)
            return VLLMEngine(model, args, seed=spec.seed, log=tail)


def _end_of(error: Exception) -> End:
    """Return exit code and reason of whatever ended a run; the one place that maps exceptions to exit codes."""
    match error:
        case RunError():
            return End(error.exit_code, str(error))
        case InputRejectedError():
            return End(ExitCode.INPUT_REFUSED, error.message)
        case CorruptStreamError():
            return End(ExitCode.INPUT_REFUSED, str(error))
        case FolderTakenError() | ObjectNameError() | StoreSettingsError():
            return End(ExitCode.USAGE, str(error))
        case StorageError() | FileNotFoundError():
            return End(ExitCode.STORAGE, str(error))
        case LeaseHeldError() | LeaseLostError():
            return End(ExitCode.HELD, str(error))
        case OSError():
            return End(ExitCode.LOCAL_DISK, f"the local disk failed: {error}")
    log.error("this is a bug; the run can be resumed", exc_info=error)
    return End(ExitCode.BUG, f"bug: {type(error).__name__}: {error}")


async def _start_attempt(folder: RunFolder, spec: BatchSpec, started_by: str) -> int:
    record = await folder.start_attempt(
        lambda number: AttemptRecord(
            run_key=spec.run_key,
            generation=spec.generation,
            number=number,
            shard=spec.shard,
            epoch=spec.epoch,
            started_by=started_by,
            node=socket.gethostname(),
            pid=os.getpid(),
            started_at=utc_now(),
        )
    )
    return record.number


def _complete(folder: RunFolder, spec: BatchSpec, attempt: int, state: RunState, end: End, text: str) -> None:
    """Put the log tail, then the record that names it. A failure here is said, and changes nothing of the end."""

    async def put() -> None:
        name = folder.layout.attempt_log(attempt, spec.shard)
        await folder.store.put(name, compress(text.encode()))
        await folder.complete_attempt(
            attempt,
            spec.shard,
            ended_at=utc_now(),
            exit_code=int(end.exit_code),
            reason=end.reason[:2000],
            final=end.exit_code.final or (end.manifest is not None and end.manifest.healable_rows == 0),
            phase=str(state.phase),
            rows=state.rows,
            rows_reused=state.rows_reused,
            by_outcome=dict(state.by_outcome),
            node=socket.gethostname(),
            pid=os.getpid(),
            log=name,
        )

    try:
        asyncio.run(put())
    except (OSError, ValueError) as error:
        log.warning("the end of attempt %d can't be recorded: %s", attempt, error)


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def _leave_at_once(end: End, finish: Callable[[End], None], release: Callable[[], None]) -> None:
    """End the process from another thread, and every process of the engine with it."""
    finish(end)
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    release()
    os._exit(end.exit_code)


def _descendants(root: int) -> list[int]:
    """Return the pids of all processes below one, as /proc has them now."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold spaces and brackets itself.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, todo = [], [root]
    while todo:
        children = [pid for pid, parent in parents.items() if parent == todo[-1]]
        todo.pop()
        found += children
        todo += children
    return found
