"""One runner process around one try: log tail, heartbeat, attempt record, and the exit code for every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from airflow_vllm_batch import __version__
from airflow_vllm_batch.batchfile.reader import InputRejectedError
from airflow_vllm_batch.contract import AttemptRecord, BatchSpec, ExitCode, Manifest, Phase
from airflow_vllm_batch.runner.engine.base import Engine
from airflow_vllm_batch.runner.engine.echo_engine import EchoEngine
from airflow_vllm_batch.runner.engine.server_engine import ServerEngine
from airflow_vllm_batch.runner.engine.vllm_engine import VLLMEngine
from airflow_vllm_batch.runner.errors import EngineStartError, RunError
from airflow_vllm_batch.runner.fingerprint import model_fingerprint, names_a_path
from airflow_vllm_batch.runner.log_tail import LogTail
from airflow_vllm_batch.runner.pipeline import Try, run
from airflow_vllm_batch.runner.reporting import Display, Heartbeat, choose_display
from airflow_vllm_batch.runner.run_state import RunState, utc_now
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectNameError, StorageError
from airflow_vllm_batch.storage.compression import CorruptStreamError, compress
from airflow_vllm_batch.storage.run_folder import FolderTakenError, RunFolder
from airflow_vllm_batch.storage.settings import StoreSettingsError

log = logging.getLogger(__name__)

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

        end = _run_guarded(spec, folder, attempt, access, state, stop, tail, finish)
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
    finish: Callable[[End], None],
) -> End:
    def end_where_loading_hangs() -> None:
        if state.phase is Phase.LOADING and stop.requested_at is not None:
            if time.monotonic() - stop.requested_at < LOADING_STOP_SECONDS:
                return
            _leave_at_once(End(ExitCode.RESUMABLE, f"stopped while the engine was loading: {stop.reason}"), finish)
        elif stop.requested_at is not None and time.monotonic() - stop.requested_at > spec.limits.stop_seconds:
            _leave_at_once(End(ExitCode.RESUMABLE, f"stopped, but not in order: {stop.reason}"), finish)

    def put_progress(raw: bytes) -> None:
        asyncio.run(folder.store.put(folder.layout.progress(spec.shard), raw))

    display: Display = choose_display(tail.terminal, time.monotonic)
    with Heartbeat(state, put_progress, display, on_beat=end_where_loading_hangs), _spool() as spool:
        try:
            log.info(
                "airflow-provider-vllm-batch %s, run %s, attempt %d, model %s",
                __version__,
                spec.run_key,
                attempt,
                spec.model.name,
            )
            fingerprint = _fingerprint(spec)
            this = Try(
                spec=spec,
                spec_digest=spec.digest(fingerprint),
                fingerprint=fingerprint,
                attempt=attempt,
                folder=folder,
                engine=_engine(spec, access, tail),
                spool=spool,
                state=state,
                stop=stop,
            )
            exit_code, manifest = asyncio.run(run(this))
        except Exception as error:  # noqa: BLE001  becomes the exit code
            return _end_of(error)
    reason = manifest.verdict.overall.reason
    if exit_code is ExitCode.INPUT_REFUSED:
        reason = f"no line of the input can run; {reason}"
    return End(exit_code, reason, manifest)


def _fingerprint(spec: BatchSpec) -> str | None:
    if spec.model.fingerprint is not None or spec.engine.kind != "vllm":
        return spec.model.fingerprint
    found = model_fingerprint(spec.model.name, spec.model.revision)
    if found is None and names_a_path(spec.model.name):
        raise EngineStartError(f"the model {spec.model.name!r} is not there: no such file or folder", passing=False)
    return found


def _engine(spec: BatchSpec, access: Access, tail: LogTail) -> Engine:
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
            return VLLMEngine(spec.model, spec.engine.args, seed=spec.seed, log=tail)


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


@contextlib.contextmanager
def _spool() -> Iterator[Path]:
    """Give a folder on the local disk (TMPDIR) that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="vllm-batch-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def _leave_at_once(end: End, finish: Callable[[End], None]) -> None:
    """End the process from another thread, and every process of the engine with it."""
    finish(end)
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
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
