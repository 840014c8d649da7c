"""Hold the lease of a run in a thread of its own: it is renewed also while an engine's load blocks everything else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from concurrent.futures import Future
from typing import Self

from airflow_vllm_batch.contract import BatchSpec, Phase, RunLayout
from airflow_vllm_batch.runner.errors import StoppedError
from airflow_vllm_batch.runner.io_thread import IoThread
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.lease import LeaseKeeper, LeaseLostError, Standing
from airflow_vllm_batch.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

RELEASE_SECONDS = 10.0


class Holding:
    """The lease of one try. Use as a context manager: leaving it gives the lease back.

    A lease that another runner took over is a stop: nothing is written any more, and the run ends with exit 73.

    :param folder: pointed at the spec's generation.
    """

    def __init__(self, folder: RunFolder, spec: BatchSpec, attempt: int, state: RunState, stop: StopSignal) -> None:
        self._folder = folder
        self._spec = spec
        self._attempt = attempt
        self._state = state
        self._stop = stop
        self._thread = IoThread()
        self._keeper: LeaseKeeper | None = None
        self._renewals: Future[None] | None = None
        self._waiting_for: str | None = None

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
        self._thread.__exit__(*exception)

    @property
    def lost(self) -> str | None:
        """Why nothing may be written any more; null while that is not so."""
        return self._keeper.lost if self._keeper is not None and self._renewals is not None else None

    @property
    def may_report(self) -> bool:
        """Whether progress is ours to write: as a challenger, or as a holder that renewed its lease in time."""
        return self._keeper is None or self._renewals is None or self._keeper.fresh

    def acquire(self, *, waits_on: bool) -> None:
        """Wait until the lease is ours. Blocks; a stop ends it at once.

        :param waits_on: whether a holder that lives is waited for, however long it takes.
        :raises LeaseHeldError: where a holder lives and is not waited for.
        :raises LeaseLostError: where the folder's generation is another one by now.
        :raises StoppedError: where a stop came first.
        :raises StorageError: where storage stays away, or the folder can't be written.
        """
        acquiring = self._thread.submit(self._acquire(waits_on=waits_on))
        self._stop.on_request(acquiring.cancel)
        try:
            acquiring.result()
        except concurrent.futures.CancelledError:
            waited = f" while waiting for the lease of {self._waiting_for}" if self._waiting_for else ""
            raise StoppedError(f"stopped{waited}: {self._stop.reason}") from None
        self._renewals = self._thread.submit(self._renew_for_ever())

    async def confirm(self) -> None:
        """Return where this runner may write now; for any event loop.

        :raises LeaseLostError: where it may not any more.
        :raises StorageError: where that can't be told now.
        """
        if self._keeper is None:
            raise LeaseLostError("the lease was never taken")
        try:
            await asyncio.wrap_future(self._thread.submit(self._keeper.confirm()))
        except LeaseLostError as error:
            self._stop.request(str(error))
            raise

    def release(self) -> None:
        """Give the lease back, once; blocks for a few seconds at most."""
        if self._renewals is not None:
            self._renewals.cancel()
        if self._keeper is not None:
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                self._thread.submit(self._keeper.release()).result(timeout=RELEASE_SECONDS)

    async def _acquire(self, *, waits_on: bool) -> None:
        store, spec = self._folder.store, self._spec
        conditions = await store.probe()
        conditional = conditions.create_only and conditions.if_match
        if not conditional:
            log.warning(
                "the store of %s ignores conditional writes: two runners on this folder can't be kept apart for "
                "certain, so let only one of them write to it",
                store.uri(),
            )

        def keeper(generation: int) -> LeaseKeeper:
            return LeaseKeeper(
                store,
                RunLayout(generation).lease(spec.shard),
                run_key=spec.run_key,
                generation=generation,
                attempt=self._attempt,
                lease_seconds=spec.limits.lease_seconds,
                conditional=conditional,
            )

        for generation in range(1, spec.generation):
            # A runner of an earlier generation writes the same outputs: it has to end, or to be fenced off.
            earlier = keeper(generation)
            await earlier.acquire(waits_on=waits_on, create=False, on_wait=self._say_who_holds)
            await earlier.release()
        self._keeper = keeper(spec.generation)
        await self._keeper.acquire(
            waits_on=waits_on,
            patience_seconds=spec.limits.storage_patience_seconds,
            on_wait=self._say_who_holds,
        )
        await self._refuse_old_generation(self._keeper)

    async def _refuse_old_generation(self, keeper: LeaseKeeper) -> None:
        owner = await self._folder.read_owner()
        if owner is None or (owner.run_key, owner.generation) == (self._spec.run_key, self._spec.generation):
            return
        await keeper.release()
        raise LeaseLostError(
            f"the folder belongs to generation {owner.generation} of the run {owner.run_key} by now, this runner was "
            f"started for generation {self._spec.generation} of {self._spec.run_key}"
        )

    def _say_who_holds(self, standing: Standing) -> None:
        holder = standing.describe()
        self._state.enter(Phase.QUEUED)
        if holder != self._waiting_for:
            self._waiting_for = holder
            log.info("waiting for the lease of %s", holder)
            self._state.note(f"waiting for the lease of {holder}")

    async def _renew_for_ever(self) -> None:
        if self._keeper is None:
            return
        try:
            await self._keeper.keep()
        except LeaseLostError as error:
            log.warning("%s: nothing is written any more", error)
            self._stop.request(str(error))
