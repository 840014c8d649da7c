"""A run's folder: whose it is, which generation is current, what its tries said and whether it is done.

The one place that reads and writes run.json, spec.json, attempt records, progress and the manifest; operators, the
command line and the runner all go through it. It never writes rows.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from airflow_vllm_batch.contract import (
    AttemptRecord,
    BatchSpec,
    CancelRequest,
    ExitCode,
    Lease,
    Manifest,
    OutputTarget,
    Progress,
    RunLayout,
    RunOwner,
)
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import (
    ObjectChangedError,
    ObjectExistsError,
    StateUnreadableError,
    StorageError,
    Store,
)


class FolderTakenError(ValueError):
    """The folder belongs to another run, or holds files of nobody we know."""


class Claim(NamedTuple):
    """What :meth:`RunFolder.claim` found or made."""

    owner: RunOwner
    created: bool
    """The folder was empty before."""
    restarted: bool
    """A new generation was begun: rows of earlier ones are not looked at."""


class RunFolder:
    """The state folder of one run.

    :param access: opens stores by the names that ``output`` gives.
    :param output: where rows go and where the state lies.
    """

    def __init__(self, access: Access, output: OutputTarget) -> None:
        self.access = access
        self.output = output
        self.store: Store = access.open_folder(output.state_uri, output.state_store)
        self.layout = RunLayout()

    def at_generation(self, generation: int) -> RunLayout:
        """Point the folder at a generation and return its names."""
        self.layout = RunLayout(generation)
        return self.layout

    # Ownership

    async def read_owner(self) -> RunOwner | None:
        """Return run.json; null where the folder is new. Raises ``StorageError``, never guesses."""
        found = await self._read_owner()
        return found[0] if found else None

    async def claim(
        self,
        run_key: str,
        *,
        epoch: int | None,
        restart: bool,
        overwrite: bool,
        created_by: str,
        now: datetime,
    ) -> Claim:
        """Make the folder this run's, or find that it already is, and point at its current generation.

        :param epoch: ``ti.max_tries``: a restart is made once for each value. Null (the command line): every call
            counts as a new one.
        :param restart: begin a new generation, unless one was begun for this epoch.
        :param overwrite: take over the folder of another run as a new generation.
        :raises FolderTakenError: where the folder is another run's and ``overwrite`` is not set.
        :raises StorageError: where that can't be told, or the folder can't be written.
        """
        for _ in range(5):
            found = await self._read_owner()
            try:
                claim = await self._claim_once(found, run_key, epoch, restart, overwrite, created_by, now)
            except (ObjectExistsError, ObjectChangedError):
                continue  # another process claimed it between our read and our write: look again
            self.at_generation(claim.owner.generation)
            return claim
        raise StorageError(f"{self.store.uri(RunLayout.run)} changes faster than it can be claimed; run again")

    async def _claim_once(
        self,
        found: tuple[RunOwner, str | None] | None,
        run_key: str,
        epoch: int | None,
        restart: bool,  # noqa: FBT001  private, called once with the same names
        overwrite: bool,  # noqa: FBT001  likewise
        created_by: str,
        now: datetime,
    ) -> Claim:
        if found is None:
            await self._refuse_foreign_files(overwrite=overwrite)
            owner = RunOwner(run_key=run_key, epoch=epoch or 0, created_at=now, created_by=created_by)
            await self.store.put_new(RunLayout.run, owner.to_bytes())
            return Claim(owner, created=True, restarted=False)

        owner, etag = found
        if owner.run_key != run_key and not overwrite:
            raise FolderTakenError(
                f"{self.output.uri} belongs to another run ({owner.run_key}, created by {owner.created_by}). "
                "One output folder is one run: put {{ run_id }} (and the map index) into the path, "
                "or say overwrite=True (--overwrite) to take the folder over"
            )
        wanted_epoch = owner.epoch + 1 if epoch is None else epoch
        taken_over = owner.run_key != run_key
        restarts = taken_over or (restart and wanted_epoch != owner.epoch)
        if not restarts and wanted_epoch == owner.epoch:
            return Claim(owner, created=False, restarted=False)
        changed = owner.model_copy(
            update={
                "run_key": run_key,
                "generation": owner.generation + restarts,
                "epoch": wanted_epoch,
                **({"created_at": now, "created_by": created_by} if taken_over else {}),
            }
        )
        if etag is None:
            await self.store.put(RunLayout.run, changed.to_bytes())
        else:
            await self.store.put_if_match(RunLayout.run, changed.to_bytes(), etag)
        return Claim(changed, created=False, restarted=restarts)

    async def _refuse_foreign_files(self, *, overwrite: bool) -> None:
        # Files of our names without a run.json were written by somebody else.
        if overwrite or self.output.state_uri != self.output.uri:
            return
        for name in (RunLayout.output, RunLayout.errors, RunLayout.manifest):
            if await self._exists(name):
                raise FolderTakenError(
                    f"{self.store.uri(name)} exists, but no run of ours owns the folder. "
                    "Choose another output folder, or say overwrite=True (--overwrite) to replace the file"
                )

    async def _read_owner(self) -> tuple[RunOwner, str | None] | None:
        found = await self._get_with_info(RunLayout.run)
        if found is None:
            return None
        raw, etag = found
        try:
            return RunOwner.read(raw, self.store.uri(RunLayout.run)), etag
        except ValueError as error:
            raise StateUnreadableError(str(error)) from error

    # Spec, attempts, progress

    async def write_spec(self, spec: BatchSpec) -> str:
        """Put spec.json of the current generation and return its URI."""
        await self.store.put(self.layout.spec, spec.to_bytes())
        return self.store.uri(self.layout.spec)

    async def read_spec(self) -> BatchSpec | None:
        raw = await self._get(self.layout.spec)
        return BatchSpec.read(raw, self.store.uri(self.layout.spec)) if raw is not None else None

    async def start_attempt(self, record: Callable[[int], AttemptRecord]) -> AttemptRecord:
        """Take the next free number of the generation and put the record that ``record(number)`` returns."""
        taken = await self.attempt_numbers()
        number = max(taken, default=0) + 1
        while True:
            started = record(number)
            try:
                await self.store.put_new(self.layout.attempt(number, started.shard), started.to_bytes())
            except ObjectExistsError:
                number += 1
                continue
            return started

    async def complete_attempt(self, number: int, shard: int | None = None, **changes: Any) -> AttemptRecord | None:
        """Fill in the end of a try, unless it is filled in; returns the record, null where there is none.

        An end without an exit code was only presumed by another try: whoever knows the code knows better.
        """
        name = self.layout.attempt(number, shard)
        raw = await self._get(name)
        if raw is None:
            return None
        record = AttemptRecord.read(raw, self.store.uri(name))
        if record.ended and (record.exit_code is not None or changes.get("exit_code") is None):
            return record
        completed = AttemptRecord.model_validate({**record.model_dump(), **changes})
        await self.store.put(name, completed.to_bytes())
        return completed

    async def attempt_numbers(self) -> list[int]:
        """Return the numbers of the generation's attempts, ascending."""
        found = {RunLayout.attempt_number(info.name) async for info in self.store.list(self.layout.attempts)}
        return sorted(number for number in found if number is not None)

    async def read_attempt(self, number: int, shard: int | None = None) -> AttemptRecord | None:
        name = self.layout.attempt(number, shard)
        raw = await self._get(name)
        return AttemptRecord.read(raw, self.store.uri(name)) if raw is not None else None

    async def newest_attempt(self) -> AttemptRecord | None:
        """Return the newest try that got hold of the run; one that left since another held it says nothing of it."""
        newest = None
        for number in reversed(await self.attempt_numbers()):
            record = await self.read_attempt(number)
            newest = newest or record
            if record is not None and record.exit_code != ExitCode.HELD:
                return record
        return newest

    async def record_deaths(self, *, before: int, shard: int | None = None, now: datetime) -> None:
        """Complete the records of earlier tries that left none: only who holds the run knows that they are dead."""
        for number in await self.attempt_numbers():
            if number < before:
                await self.complete_attempt(
                    number, shard, ended_at=now, reason="ended without a word; found by a later try", final=False
                )

    async def epoch_began_at(self, epoch: int, shard: int | None = None) -> datetime | None:
        """Return when the first try of an epoch started; null where no try of it is on record."""
        records = [await self.read_attempt(number, shard) for number in await self.attempt_numbers()]
        return min((record.started_at for record in records if record and record.epoch == epoch), default=None)

    async def read_progress(self, shard: int | None = None) -> Progress | None:
        """Return what the runner last said of itself; null where it said nothing that can be read.

        Progress is never the truth, so one that can't be parsed is as good as none.
        """
        name = self.layout.progress(shard)
        raw = await self._get(name)
        if raw is None:
            return None
        try:
            return Progress.read(raw, self.store.uri(name))
        except ValueError:
            return None

    async def read_lease(self, shard: int | None = None) -> Lease | None:
        """Return the lease as it stands; null where there is none that can be read."""
        name = self.layout.lease(shard)
        raw = await self._get(name)
        if raw is None:
            return None
        try:
            return Lease.read(raw, self.store.uri(name))
        except ValueError:
            return None

    async def write_cancel(self, request: CancelRequest) -> None:
        await self.store.put(self.layout.cancel, request.to_bytes())

    async def read_cancel(self) -> CancelRequest | None:
        raw = await self._get(self.layout.cancel)
        return CancelRequest.read(raw, self.store.uri(self.layout.cancel)) if raw is not None else None

    # Manifest

    async def read_manifest(self) -> Manifest | None:
        """Return manifest.json whatever its generation; null only where there is none.

        :raises StateUnreadableError: where it is there and can't be read as a manifest.
        """
        raw = await self._get(RunLayout.manifest)
        if raw is None:
            return None
        try:
            return Manifest.read(raw, self.store.uri(RunLayout.manifest))
        except ValueError as error:
            raise StateUnreadableError(str(error)) from error

    async def read_done_manifest(self) -> Manifest | None:
        """Return the manifest where the run is done: it is of the current generation, its outputs are as it says.

        One HEAD per output. While a later try replaces outputs they differ, so no reader takes a mix for done.
        """
        manifest = await self.read_manifest()
        if manifest is None or manifest.generation != self.layout.generation:
            return None
        for output in manifest.outputs:
            if output.status is not None:
                if not 200 <= output.status < 300:
                    return None
                continue
            try:
                info = await self.access.open_source(output.uri, self.output.store).info()
            except FileNotFoundError:
                return None
            if info.size != output.bytes or (output.etag and info.etag and output.etag != info.etag):
                return None
        return manifest

    async def write_manifest(self, manifest: Manifest) -> None:
        await self.store.put(RunLayout.manifest, manifest.to_bytes())

    # Reading

    async def _exists(self, name: str) -> bool:
        try:
            await self.store.head(name)
        except FileNotFoundError:
            return False
        return True

    async def _get(self, name: str) -> bytes | None:
        found = await self._get_with_info(name)
        return found[0] if found else None

    async def _get_with_info(self, name: str) -> tuple[bytes, str | None] | None:
        try:
            raw, info = await self.store.get_with_info(name)
        except FileNotFoundError:
            return None
        except StateUnreadableError:
            raise
        except OSError as error:
            raise StateUnreadableError(
                f"cannot tell whether {self.store.uri(name)} exists ({error}); nothing was started"
            ) from error
        return raw, info.etag
