"""One try of a task: claim the folder, judge what is done, check, start a runner, watch it, judge what it left.

Asks Airflow nothing: what it needs of the task (log, XCom, credentials) comes in as arguments, so that a task and a
test drive the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_vllm_batch import input_copy, preflight
from airflow_vllm_batch.arguments import Mode, Refusal, StageInput, check_model
from airflow_vllm_batch.connections import expires_at
from airflow_vllm_batch.contract import AttemptRecord, BatchSpec, ExitCode, Manifest, Verdict
from airflow_vllm_batch.contract.layout import RunLayout
from airflow_vllm_batch.exceptions import BatchStoppedError, VLLMBatchError, VLLMBatchFailedError
from airflow_vllm_batch.input_copy import InputCopy
from airflow_vllm_batch.judging import (
    Next,
    Places,
    end_message,
    failure_message,
    is_final,
    judge_now,
    next_for_done,
    places_of,
    result_document,
    rows_left,
)
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.model_objects import fingerprinted
from airflow_vllm_batch.storage.run_folder import Claim, RunFolder
from airflow_vllm_batch.storage.settings import StoreFile
from airflow_vllm_batch.watching import Look, Step, look, progress_document
from airflow_vllm_batch.workers.base import Launch, RunningWorker, Worker, WorkerEnd, WorkerUnusableError

log = logging.getLogger(__name__)

OPERATOR = "operator"
"""Who starts attempts and judges again, in attempt records and verdicts."""
STOP_SECONDS = 35.0
"""The runner bounds its own stop to 30 s; after this it is ended by force."""
LAST_WORD_SECONDS = 3.0
"""After a kill, Airflow ends this process 5 s later."""


@dataclass(frozen=True)
class Plan:
    """What is asked of a try.

    :param spec: complete but for generation, attempt and the inputs' ETags.
    :param epoch: null where every try counts as a new one.
    """

    spec: BatchSpec
    worker: Worker
    epoch: int | None
    restart: bool
    overwrite: bool
    preflight: Mode
    stage_input: StageInput
    poll_interval: float
    created_by: str
    airflow_try: int | None = None


class OneTry:
    """Runs once.

    :param store: builds the store file with the credentials of now; may block for seconds.
    :param publish: takes an XCom's key and value; may block, raises nothing.
    :param emit: takes each line that the runner prints, from any thread.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        store: Callable[[], StoreFile],
        publish: Callable[[str, Any], None],
        emit: Callable[[str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._plan = plan
        self._spec = plan.spec
        self._build_store = store
        self._store = store()
        self._renew_at = _renew_at(self._store, now())
        self._publish = publish
        self._emit = emit
        self._now = now
        self._access = Access(lambda: self._store)
        self._stopped = False
        self._running: RunningWorker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def stop(self) -> None:
        """Make :meth:`run` raise ``BatchStoppedError`` soon. Safe in a signal handler of the loop's own thread."""
        self._stopped = True
        if self._running is not None:
            self._running.ask_to_stop()
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def run(self) -> dict[str, Any]:
        """Return the result's document where the batch passes.

        :raises VLLMBatchFailedError: where it does not, or can't be started, and another try would be no better.
        :raises VLLMBatchError: where another try may be.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        document = result_document(self._spec.run_key, None, None, self._places())
        try:
            if self._stopped:
                raise asyncio.CancelledError
            return await self._run()
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            # No XCom: Airflow ends this process within seconds, and the next try clears what it said.
            raise BatchStoppedError(
                "the task was told to stop (by a user, or because its Airflow worker stops). Finished rows are kept in "
                f"{self._spec.output.state_uri}: a retry, or clearing the task, runs only the rows without a result"
            ) from None
        except _VerdictError as error:
            self._publish_all(error.document)
            raise _error(str(error), exit_code=ExitCode.TOO_MANY_FAILED, final=error.final) from None
        except (Refusal, OSError, ValueError) as error:
            self._publish_all(document)
            code = exit_code_of(error)
            message = end_message(str(error), exit_code=code, record=None, folder_uri=self._spec.output.state_uri)
            raise _error(message, exit_code=code, final=code.final) from error
        except Exception:
            self._publish_all(document)
            raise

    async def _run(self) -> dict[str, Any]:
        spec = self._spec
        preflight.check_places(spec.inputs, spec.output.uri, spec.output.state_uri)
        folder = RunFolder(self._access, spec.output)
        claim = await self._claim(folder)
        self._spec = spec = spec.model_copy(update={"generation": claim.owner.generation, "epoch": claim.owner.epoch})
        stored = await folder.read_spec()
        if (document := await self._judge_what_is_done(folder, stored)) is not None:
            return document
        record = await folder.start_attempt(self._new_record)
        self._spec = spec = spec.model_copy(update={"attempt": record.number})
        try:
            await self._prepare(folder, stored)
        except (Refusal, OSError, ValueError) as error:
            await self._record_end(folder, exit_code_of(error), str(error), phase="preflight")
            raise
        end = await self._run_worker(folder)
        return await self._finish(folder, end)

    async def _claim(self, folder: RunFolder) -> Claim:
        plan = self._plan
        claim = await folder.claim(
            self._spec.run_key,
            epoch=plan.epoch,
            restart=plan.restart,
            overwrite=plan.overwrite,
            created_by=plan.created_by,
            now=self._now(),
        )
        how = "new" if claim.created else "begun anew" if claim.restarted else "ours already"
        log.info("run %s, generation %d: %s is %s", claim.owner.run_key, claim.owner.generation, folder.output.uri, how)
        return claim

    def _new_record(self, number: int) -> AttemptRecord:
        return AttemptRecord(
            run_key=self._spec.run_key,
            generation=self._spec.generation,
            number=number,
            epoch=self._spec.epoch,
            airflow_try=self._plan.airflow_try,
            started_by=OPERATOR,
            worker=self._plan.worker.kind,
            node=socket.gethostname(),
            started_at=self._now(),
        )

    # A run that is done

    async def _judge_what_is_done(self, folder: RunFolder, stored: BatchSpec | None) -> dict[str, Any] | None:
        """Answer from a manifest that is done; null where something has to run."""
        manifest = await folder.read_done_manifest()
        if manifest is None:
            return None
        verdict = judge_now(manifest, self._spec.policy, now=self._now(), judged_by=OPERATOR)
        inputs_now, spec = None, self._spec
        try:
            inputs_now = await preflight.pin_inputs(self._access, spec.inputs)
            spec = await fingerprinted(spec, self._access)
        except (StorageError, Refusal) as error:
            log.warning("whether input or model changed since can't be told, so what is done counts: %s", error)
        if next_for_done(manifest, stored, spec, inputs_now, verdict) is Next.RUN:
            return None
        log.info("the batch is done already (attempt %d): judged again, nothing is started", manifest.attempt)
        if verdict is not manifest.verdict:
            manifest = manifest.model_copy(update={"verdict": verdict})
            await folder.write_manifest(manifest)
        return self._settle(manifest, verdict)

    # Before the start

    async def _prepare(self, folder: RunFolder, stored: BatchSpec | None) -> None:
        """Check all that can be known, then put the spec: it is the proof that the checks were passed."""
        plan = self._plan
        warnings = [*preflight.check_urls(self._store, self._now()), *await preflight.check_folder(folder)]
        for warning in warnings:
            log.warning("%s", warning)
        if self._spec.engine.kind == "vllm":
            check_model(self._spec.model.name)
            await preflight.check_weights(self._access, self._spec)
        for warning in await plan.worker.check(self._spec.engine.kind):
            log.warning("%s", warning)
        self._spec = self._spec.model_copy(
            update={
                "inputs": await preflight.pin_inputs(self._access, self._spec.inputs),
                "labels": {**self._spec.labels, preflight.LABEL: plan.preflight},
            }
        )
        with input_copy.scratch_folder() as scratch:
            await self._check_and_copy(folder, stored, scratch)

    async def _check_and_copy(self, folder: RunFolder, stored: BatchSpec | None, scratch: Path) -> None:
        """Check the rows, and copy inputs that the worker can't read, in one pass over each where that is possible."""
        plan, spec = self._plan, self._spec
        wanted = input_copy.wanted(plan.stage_input, spec.inputs, worker_reads_them=plan.worker.reads_inputs)
        before = stored.inputs if stored is not None and len(stored.inputs) == len(spec.inputs) else None
        kept = [
            index
            for index in wanted
            if before and await input_copy.still_there(folder, before[index], spec.inputs[index])
        ]
        copies = {index: InputCopy(folder, index, scratch) for index in wanted if index not in kept}
        if plan.preflight == "off":
            log.info("preflight is off: the rows are checked by the runner")
        elif preflight.already_checked(stored, spec, plan.preflight):
            log.info("the input is unchanged since it was checked: not checked again")
        else:
            found = await preflight.check_rows(spec, self._access, plan.preflight, copies=copies)
            for warning in found.warnings:
                log.warning("%s", warning)
            log.info("input checked: %s", found.describe())
            copies = {}
        for index, copy in copies.items():
            await input_copy.copy_whole(copy, self._access, spec.inputs[index])
        inputs = [
            source.model_copy(update={"staged": folder.layout.staged_input(index) if index in wanted else None})
            for index, source in enumerate(spec.inputs)
        ]
        self._spec = spec.model_copy(update={"inputs": tuple(inputs)})

    # The runner

    async def _run_worker(self, folder: RunFolder) -> WorkerEnd:
        spec_uri = await folder.write_spec(self._spec)
        launch = Launch(spec_uri, self._store, self._spec.attempt or 1)
        try:
            running = await self._plan.worker.start(launch, self._emit)
        except (OSError, ValueError) as error:
            await self._record_end(folder, exit_code_of(error), str(error), phase="preflight")
            raise
        # No await between the start and this: a stop always finds what it has to stop.
        self._running = running
        try:
            log.info("attempt %d runs as %s", launch.attempt, running.description)
            return await self._watch(folder, running)
        except asyncio.CancelledError:
            if self._stopped:
                await self._last_word(folder, running)
            raise
        finally:
            if not self._stopped and running.poll() is None:
                await running.stop(wait_seconds=STOP_SECONDS)
            running.close()

    async def _watch(self, folder: RunFolder, running: RunningWorker) -> WorkerEnd:
        seen: Look | None = None
        while True:
            end = await running.wait(self._plan.poll_interval)
            await self._renew(running)
            progress = None
            try:
                progress = await folder.read_progress()
            except StorageError as error:
                # The runner has its own patience with storage; only its end counts.
                log.warning("progress can't be read: %s", error)
            seen = look(end, progress, attempt=self._spec.attempt or 1, before=seen, now=self._now())
            if seen.line and not self._plan.worker.tells_progress:
                log.info("%s", seen.line)
            if seen.document is not None:
                self._publish("vllm_progress", seen.document)
            if seen.step is Step.FINISH and end is not None:
                if progress is not None and progress.attempt == self._spec.attempt:
                    self._publish("vllm_progress", progress_document(progress))
                return end

    async def _renew(self, running: RunningWorker) -> None:
        """Hand over new credentials at half of what is left of the old ones."""
        if self._renew_at is None or self._now() < self._renew_at:
            return
        try:
            store = await asyncio.to_thread(self._build_store)
        except VLLMBatchError as error:
            log.warning("credentials can't be renewed, the old ones stay in use: %s", error)
            self._renew_at = None
            return
        self._renew_at = _renew_at(store, self._now())
        if store != self._store:
            self._store = store
            running.renew(store)

    async def _last_word(self, folder: RunFolder, running: RunningWorker) -> None:
        """Give a runner that was told to stop the seconds that this process still has, and record its end."""
        running.ask_to_stop()  # a stop in the moment of the start found nobody to tell
        end = await running.wait(LAST_WORD_SECONDS)
        if end is None:
            log.info("%s is still stopping: it ends by itself, and the next try waits for it", running.description)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._record_end(folder, end.exit_code, end.reason, phase=None)

    # Afterwards

    async def _finish(self, folder: RunFolder, end: WorkerEnd) -> dict[str, Any]:
        record = await self._record_end(folder, end.exit_code, end.reason, phase=None)
        if end.meaning is not ExitCode.HELD:
            await self._record_earlier_deaths(folder)
        manifest = await self._manifest_of_this_try(folder, end)
        if manifest is not None:
            return self._settle(manifest, manifest.verdict)
        if end.meaning is not None and end.meaning.has_manifest:
            raise VLLMBatchError(
                f"{end.reason}, but {folder.store.uri(RunLayout.manifest)} and its outputs do not say so: somebody "
                "else writes to this folder, or the store loses writes. A retry writes them again",
                exit_code=end.exit_code,
            )
        reason = (record.reason if record else None) or end.reason
        raise _error(
            end_message(reason, exit_code=end.exit_code, record=record, folder_uri=folder.output.state_uri),
            exit_code=end.exit_code,
            final=is_final(end.exit_code, record),
        )

    async def _manifest_of_this_try(self, folder: RunFolder, end: WorkerEnd) -> Manifest | None:
        if end.meaning not in {ExitCode.PASSED, ExitCode.TOO_MANY_FAILED, ExitCode.INPUT_REFUSED}:
            return None
        manifest = await folder.read_done_manifest()
        return manifest if manifest is not None and manifest.attempt == self._spec.attempt else None

    async def _record_end(
        self, folder: RunFolder, exit_code: int, reason: str, *, phase: str | None
    ) -> AttemptRecord | None:
        """Complete our attempt where the runner did not: it died, or was never started.

        A record that can't be written hides neither the end nor its cause: it is said, and a later try completes it.
        """
        changes: dict[str, Any] = {
            "ended_at": self._now(),
            "exit_code": exit_code,
            "reason": reason[:2000],
            "final": is_final(exit_code),
        }
        if phase is not None:
            changes["phase"] = phase
        try:
            return await folder.complete_attempt(self._spec.attempt or 1, **changes)
        except StorageError as error:
            log.warning("the end of this attempt can't be recorded: %s", error)
            return None

    async def _record_earlier_deaths(self, folder: RunFolder) -> None:
        try:
            await folder.record_deaths(before=self._spec.attempt or 1, now=self._now())
        except StorageError as error:
            log.warning("the end of an earlier attempt can't be recorded: %s", error)

    def _settle(self, manifest: Manifest, verdict: Verdict) -> dict[str, Any]:
        document = result_document(self._spec.run_key, manifest, verdict, self._places())
        if not verdict.passed:
            raise _VerdictError(
                failure_message(manifest, verdict), document, final=rows_left(manifest, epoch=self._spec.epoch) == 0
            )
        log.info("passed: %s", verdict.overall.reason)
        return document

    def _places(self) -> Places:
        return places_of(self._spec.output.uri, self._spec.output.state_uri)

    def _publish_all(self, document: dict[str, Any]) -> None:
        """Publish a failure as Airflow publishes a success: every member, and the whole."""
        for key, value in {**document, "return_value": document}.items():
            self._publish(key, value)


class _VerdictError(Exception):
    """The run is complete and does not pass."""

    def __init__(self, message: str, document: dict[str, Any], *, final: bool) -> None:
        super().__init__(message)
        self.document = document
        self.final = final


def exit_code_of(error: Refusal | OSError | ValueError) -> ExitCode:
    """Return the exit code that stands for a fault found on the control plane."""
    match error:
        case Refusal():
            return error.exit_code
        case WorkerUnusableError():
            return ExitCode.ENGINE_CONFIG
        case StorageError() | FileNotFoundError():
            return ExitCode.STORAGE
        case OSError():
            return ExitCode.LOCAL_DISK
        case _:  # the folder of another run, a name that no store can hold, settings that open nothing
            return ExitCode.USAGE


def _error(message: str, *, exit_code: int, final: bool) -> VLLMBatchError:
    return (VLLMBatchFailedError if final else VLLMBatchError)(message, exit_code=exit_code)


def _renew_at(store: StoreFile, now: datetime) -> datetime | None:
    """Return when half of what is left of the first credentials to end is over; null where none end."""
    ends = [end for settings in store.stores.values() if (end := expires_at(settings)) is not None]
    return now + (min(ends) - now) / 2 if ends else None
