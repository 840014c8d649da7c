"""The lease around a try: which generation it is for, what a store must enforce, and what a stop does to the wait."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import Lease, RunLayout
from airflow_vllm_batch.runner.errors import StoppedError
from airflow_vllm_batch.runner.holding import Holding
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.base import StorageError, Store
from airflow_vllm_batch.storage.lease import LeaseKeeper, LeaseLostError
from tests.support.leases import FlakyStore, UnconditionalStore
from tests.support.runs import LocalRun


class Try:
    """A try of a generation on a store, from its attempt's number on."""

    def __init__(self, root: Path, store: Store, *, generation: int = 1, attempt: int = 1, seconds: float = 60) -> None:
        run = LocalRun(root, [])
        self.spec = run.spec(generation=generation, lease_seconds=seconds)
        self.folder = run.folder(self.spec)
        self.folder.store = store
        self.folder.at_generation(generation)
        self.state = RunState("test-run", generation, attempt)
        self.stop = StopSignal()
        self.holding = Holding(self.folder, self.spec, attempt, self.state, self.stop)


def lease_in(store: Store, generation: int = 1) -> Lease:
    return Lease.read(asyncio.run(store.get(RunLayout(generation).lease())), "lease.json")


async def claim(store: Store, root: Path, *, restart: bool, epoch: int) -> None:
    folder = Try(root, store).folder
    await folder.claim(
        "test-run", epoch=epoch, restart=restart, overwrite=False, created_by="test", now=datetime.now(UTC)
    )


def test_leaving_gives_the_lease_back(tmp_path: Path) -> None:
    store = FlakyStore()
    this = Try(tmp_path, store)
    with this.holding as lease:
        lease.acquire(waits_on=False)
        asyncio.run(lease.confirm())
        assert lease_in(store).released_at is None
    assert lease_in(store).released_at is not None
    assert lease.lost is None


def test_a_store_that_ignores_conditions_is_said_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_vllm_batch.storage.lease.SETTLE_SECONDS", 0.0)
    this = Try(tmp_path, UnconditionalStore())
    with this.holding as lease:
        lease.acquire(waits_on=False)
        asyncio.run(lease.confirm())
    assert "ignores conditional writes: two runners on this folder can't be kept apart for certain" in caplog.text


def test_a_runner_of_a_generation_that_is_over_does_not_start(tmp_path: Path) -> None:
    store = FlakyStore()
    asyncio.run(claim(store, tmp_path, restart=False, epoch=0))
    asyncio.run(claim(store, tmp_path, restart=True, epoch=1))
    with Try(tmp_path, store).holding as lease, pytest.raises(LeaseLostError, match="generation 2 of the run test-run"):
        lease.acquire(waits_on=True)
    assert lease_in(store).released_at is not None


def test_a_restart_fences_off_a_runner_of_the_generation_before(tmp_path: Path) -> None:
    store = FlakyStore()
    old = LeaseKeeper(store, RunLayout(1).lease(), run_key="test-run", generation=1, attempt=1, lease_seconds=60.0)
    asyncio.run(old.acquire(waits_on=False))
    with Try(tmp_path, store, generation=2, attempt=1, seconds=0.02).holding as lease:
        lease.acquire(waits_on=True)
        asyncio.run(lease.confirm())
        with pytest.raises(LeaseLostError):
            asyncio.run(old.renew())
    assert lease_in(store, generation=2).attempt == 1


def test_a_stop_that_came_before_the_lease_ends_the_try(tmp_path: Path) -> None:
    this = Try(tmp_path, FlakyStore())
    this.stop.request("received SIGTERM")
    with this.holding as lease, pytest.raises(StoppedError, match=r"^stopped: received SIGTERM$"):
        lease.acquire(waits_on=True)


def test_a_folder_that_can_not_be_written_is_found_before_anything_else(tmp_path: Path) -> None:
    store = FlakyStore()
    store.away = True
    with Try(tmp_path, store).holding as lease, pytest.raises(StorageError, match="the store is away"):
        lease.acquire(waits_on=True)


def test_a_lease_that_is_taken_over_stops_the_run(tmp_path: Path) -> None:
    store = FlakyStore()
    this = Try(tmp_path, store)
    with this.holding as lease:
        lease.acquire(waits_on=False)
        thief = lease_in(store).model_copy(update={"writer_id": "another", "attempt": 2})
        asyncio.run(store.put(RunLayout(1).lease(), thief.to_bytes()))
        assert lease._keeper is not None
        lease._keeper._confirmed_at = 0.0  # as after a long freeze
        with pytest.raises(LeaseLostError, match="taken over by attempt 2"):
            asyncio.run(lease.confirm())
        assert not lease.may_report
        assert this.stop.requested
        assert lease.lost == this.stop.reason
    assert lease_in(store).writer_id == "another"
