"""The lease of a run: only its holder writes segments, outputs and the manifest. Knows no rows and no threads.

The holder counts ``renewals`` up, with If-Match. A challenger watches the object by a clock of its own and takes over
what did not change for ``lease_seconds``; clocks of two machines are never compared. A holder that is overtaken finds
its object changed; one that could not renew in time asks before it writes anything more. So two never write at once.

What the lease can't do: an upload that began under it goes on while its holder is frozen, and ends when that wakes.
The manifest then names other bytes than the outputs have, so nobody takes the mix for done, and the next try puts
them again without an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import NamedTuple

from airflow_vllm_batch.contract import Lease
from airflow_vllm_batch.storage.base import ObjectChangedError, ObjectExistsError, StorageError, Store
from airflow_vllm_batch.storage.processes import is_gone, own_identity

log = logging.getLogger(__name__)

FRESH_SHARE = 0.75
"""A holder that renewed within this share of the take-over time writes without asking again; the rest is for puts."""
SETTLE_SECONDS = 2.0
"""On a store without conditions two may write at once; after this pause both read who wrote last."""

Sleep = Callable[[float], Awaitable[None]]


class LeaseHeldError(Exception):
    """Another runner holds the run, and lives."""


class LeaseLostError(Exception):
    """Another runner took the lease over: nothing more may be written."""


def lease_clock() -> float:
    """Return seconds that go on while this process, or the whole machine, is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _Seen(NamedTuple):
    """A lease of another writer, unchanged since a moment of our clock."""

    raw: bytes
    since: float


class Standing(NamedTuple):
    """What stands in a challenger's way."""

    lease: Lease | None
    """Null where the object is no lease that can be read."""
    renewed: bool
    """Whether it changed while this challenger watched: its holder lives."""

    def describe(self) -> str:
        if self.lease is None:
            return "a runner whose lease can't be read"
        where = f" on {self.lease.host}" if self.lease.host else ""
        pid = f" (pid {self.lease.pid})" if self.lease.pid else ""
        return f"attempt {self.lease.attempt}{where}{pid}"


class LeaseKeeper:
    """One writer's side of a lease, first as challenger, then as holder. For one event loop.

    :param name: of the lease object.
    :param lease_seconds: without a change for so long the lease may be taken over.
    :param conditional: whether the store enforces create-only and If-Match (``Store.probe``). Without them two that
        start at the same moment find each other out only at the next look.
    :param clock: seconds that never jump.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        run_key: str,
        generation: int,
        attempt: int,
        lease_seconds: float,
        conditional: bool = True,
        clock: Callable[[], float] = lease_clock,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Sleep = asyncio.sleep,
        holder_is_gone: Callable[[str | None], bool] = is_gone,
    ) -> None:
        self._store = store
        self._name = name
        self._lease_seconds = lease_seconds
        self._conditional = conditional
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._holder_is_gone = holder_is_gone
        self._lock = asyncio.Lock()  # one write at a time: each needs the ETag of the one before
        self._seen: _Seen | None = None
        self._renewed = False
        self._etag: str | None = None
        self._confirmed_at: float | None = None
        self._released = False
        self.lost: str | None = None
        """Why nothing may be written any more; null while that is not so."""
        self._lease = Lease(
            run_key=run_key,
            generation=generation,
            writer_id=secrets.token_hex(16),
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=own_identity(),
            taken_at=now(),
            renewed_at=now(),
        )

    @property
    def writer_id(self) -> str:
        return self._lease.writer_id

    @property
    def held(self) -> bool:
        """Whether the lease was taken and neither released nor lost, as far as is known here."""
        return self._confirmed_at is not None and not self._released and self.lost is None

    @property
    def fresh(self) -> bool:
        """Whether it was renewed so lately that nobody can have taken it over."""
        return (
            self._confirmed_at is not None
            and self.held
            and self._clock() < self._confirmed_at + FRESH_SHARE * self._lease_seconds
        )

    @property
    def renew_every_seconds(self) -> float:
        return self._lease_seconds / 4

    # Challenger

    async def challenge(self, *, create: bool = True) -> Standing | None:
        """Look once, and take the lease where it is free; returns what stands in the way, null where nothing does.

        :param create: false where only a living holder matters: then a lease that is absent or free is left alone.
        :raises StorageError: where that can't be told. The lease may be ours all the same; the next look shows it.
        """
        asked_at = self._clock()
        try:
            raw, info = await self._store.get_with_info(self._name)
        except FileNotFoundError:
            self._seen = None
            return None if not create or await self._write_first() else Standing(None, self._renewed)
        except StorageError:
            # A store that is away also keeps the holder from renewing: that time does not count against it.
            self._seen = None
            raise
        lease = _parse(raw, self._name)
        if lease is not None and lease.writer_id == self.writer_id:
            # Our own put, whose reply was lost. Others count from then, so it is renewed before it is relied upon.
            self._lease, self._etag = lease, info.etag
            await self.renew()
            return None
        free = lease is not None and (lease.released_at is not None or self._holder_is_gone(lease.process))
        if free and not create:
            return None
        if not free and (self._seen is None or self._seen.raw != raw):
            self._renewed = self._renewed or self._seen is not None
            self._seen = _Seen(raw, self._clock())
        if free or (self._seen is not None and asked_at - self._seen.since >= self._lease_seconds):
            taken = await self._write(self._lease, info.etag)
            return None if taken else Standing(lease, self._renewed)
        return Standing(lease, self._renewed)

    async def acquire(
        self,
        *,
        waits_on: bool,
        patience_seconds: float = 0.0,
        on_wait: Callable[[Standing], None] = lambda standing: None,
        create: bool = True,
    ) -> None:
        """Challenge until the lease is ours.

        :param waits_on: whether to wait for a holder that lives; else ``LeaseHeldError`` once it was watched for
            ``lease_seconds`` and renewed its lease meanwhile.
        :param patience_seconds: how long storage may be away.
        :param on_wait: told of each look that found another holder.
        :raises StorageError: where storage stays away.
        """
        began = self._clock()
        answered_at = began
        while True:
            try:
                standing = await self.challenge(create=create)
            except StorageError:
                if self._clock() - answered_at >= patience_seconds:
                    raise
            else:
                if standing is None:
                    return
                answered_at = self._clock()
                on_wait(standing)
                if not waits_on and standing.renewed and answered_at - began >= self._lease_seconds:
                    raise LeaseHeldError(f"held by {standing.describe()}, which renews its lease {self._where()}")
            await self._sleep(min(2.0, self._lease_seconds / 20))

    # Holder

    async def renew(self) -> None:
        """Renew now.

        :raises LeaseLostError: where another writer has the lease.
        :raises StorageError: where it could not be renewed; it is still held for a while.
        """
        async with self._lock:
            self._refuse_lost()
            # Twice: an earlier put of ours, whose reply was lost, may have changed the ETag.
            for _ in range(2):
                renewed = self._lease.model_copy(
                    update={"renewals": self._lease.renewals + 1, "renewed_at": self._now()}
                )
                if await self._write(renewed, self._etag):
                    return
                await self._find_own()
            raise StorageError(f"{self._where()} changes faster than it can be renewed")

    async def confirm(self) -> None:
        """Return where this writer may write now; renews the lease first where that is not sure.

        :raises LeaseLostError: where it may never write again.
        :raises StorageError: where that can't be told now.
        """
        self._refuse_lost()
        if not self.fresh:
            await self.renew()

    async def keep(self) -> None:
        """Renew for ever; ends with ``LeaseLostError``. A store that is away is asked again more often."""
        complained = False
        while True:
            await self._sleep(self.renew_every_seconds / (3 if complained else 1))
            try:
                async with asyncio.timeout(self._lease_seconds / 2):
                    await self.renew()
                complained = False
            except (StorageError, TimeoutError) as error:
                if not complained:
                    log.warning("the lease can't be renewed now: %s", error)
                complained = True

    async def release(self) -> None:
        """Give the lease back, so that the next one need not wait. Where that fails it waits."""
        if not self.held:
            return
        async with self._lock:
            released = self._lease.model_copy(
                update={"renewals": self._lease.renewals + 1, "renewed_at": self._now(), "released_at": self._now()}
            )
            with contextlib.suppress(StorageError, LeaseLostError):
                if not await self._write(released, self._etag):
                    await self._find_own()
                    await self._write(released, self._etag)
            self._released = True

    def _refuse_lost(self) -> None:
        if self._released and self.lost is None:
            self.lost = "the lease was given back"
        if self.lost is not None:
            raise LeaseLostError(self.lost)

    def _where(self) -> str:
        return self._store.uri(self._name)

    # Writing

    async def _write_first(self) -> bool:
        sent_at = self._clock()
        try:
            self._etag = (await self._store.put_new(self._name, self._lease.to_bytes())).etag
        except ObjectExistsError:
            return False
        return await self._settled(sent_at)

    async def _write(self, lease: Lease, etag: str | None) -> bool:
        """Put a lease of ours in place of what has this ETag; false where another one is there."""
        if not self._conditional and self._confirmed_at is not None and not await self._is_own():
            return False
        sent_at = self._clock()
        try:
            if self._conditional and etag is not None:
                info = await self._store.put_if_match(self._name, lease.to_bytes(), etag)
            else:
                info = await self._store.put(self._name, lease.to_bytes())
        except ObjectChangedError:
            return False
        self._lease, self._etag = lease, info.etag
        return await self._settled(sent_at)

    async def _settled(self, sent_at: float) -> bool:
        if not self._conditional and self._confirmed_at is None:
            await self._sleep(SETTLE_SECONDS)
            if not await self._is_own():
                return False
        # Others count from when the put arrived, which was later.
        self._confirmed_at = sent_at
        return True

    async def _is_own(self) -> bool:
        try:
            lease = _parse(await self._store.get(self._name), self._name)
        except FileNotFoundError:
            return False
        return lease is not None and lease.writer_id == self.writer_id

    async def _find_own(self) -> None:
        """Take up an earlier put of ours; raises ``LeaseLostError`` where the lease is another's or gone."""
        lease, etag = None, None
        with contextlib.suppress(FileNotFoundError):
            raw, info = await self._store.get_with_info(self._name)
            lease, etag = _parse(raw, self._name), info.etag
        if lease is not None and lease.writer_id == self.writer_id:
            self._lease, self._etag = lease, etag
            return
        taken = Standing(lease, renewed=True).describe() if lease is not None else "nobody: the object is gone"
        self.lost = f"the run was taken over by {taken} while this runner could not renew its lease {self._where()}"
        raise LeaseLostError(self.lost)


def _parse(raw: bytes, name: str) -> Lease | None:
    try:
        return Lease.read(raw, name)
    except ValueError:
        return None
