"""Who may write to a run: taking, keeping, losing and giving back its lease, by clocks that the test moves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import Lease
from airflow_vllm_batch.storage.base import StorageError, Store
from airflow_vllm_batch.storage.lease import LeaseHeldError, LeaseKeeper, LeaseLostError
from airflow_vllm_batch.storage.local import LocalStore
from airflow_vllm_batch.storage.memory import MemoryStore
from airflow_vllm_batch.storage.processes import is_gone, own_identity
from tests.support.leases import LEASE, FakeTime, FlakyStore, UnconditionalStore, keeper


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            return MemoryStore()
        case "local":
            return LocalStore(tmp_path / "run")
        case _:
            return request.getfixturevalue("s3_server").open_folder("tests", uuid.uuid4().hex)


async def lease_in(store: Store) -> Lease:
    return Lease.read(await store.get(LEASE), "lease.json")


async def hold(store: Store, time: FakeTime, attempt: int = 1) -> LeaseKeeper:
    holder = keeper(store, time, attempt)
    await holder.acquire(waits_on=False)
    return holder


async def is_fenced(writer: LeaseKeeper) -> bool:
    try:
        await writer.confirm()
    except LeaseLostError:
        return True
    return False


async def test_the_first_one_makes_the_lease_and_may_write(store: Store) -> None:
    holder = await hold(store, FakeTime())
    await holder.confirm()
    lease = await lease_in(store)
    assert (lease.writer_id, lease.attempt, lease.renewals, lease.released_at) == (holder.writer_id, 1, 0, None)


async def test_a_lease_that_does_not_change_is_taken_over_after_sixty_seconds_and_not_before(store: Store) -> None:
    time = FakeTime()
    await hold(store, time)
    challenger = keeper(store, time, 2)
    assert (await challenger.challenge()) is not None
    time.seconds = 59.9
    assert (await challenger.challenge()) is not None
    time.seconds = 60.0
    assert (await challenger.challenge()) is None
    assert (await lease_in(store)).attempt == 2


async def test_a_renewal_starts_the_wait_anew(store: Store) -> None:
    time = FakeTime()
    holder = await hold(store, time)
    challenger = keeper(store, time, 2)
    await challenger.challenge()
    time.seconds = 40.0
    await holder.renew()
    time.seconds = 60.0
    standing = await challenger.challenge()
    assert standing is not None
    assert standing.renewed
    time.seconds = 119.9
    assert (await challenger.challenge()) is not None
    time.seconds = 120.0
    assert (await challenger.challenge()) is None


async def test_clocks_of_two_machines_are_never_compared(store: Store) -> None:
    await hold(store, FakeTime(seconds=1_000_000.0))
    late = FakeTime(seconds=5.0)
    challenger = keeper(store, late, 2)
    assert (await challenger.challenge()) is not None
    late.seconds = 65.0
    assert (await challenger.challenge()) is None


async def test_a_lease_that_was_given_back_is_taken_at_once(store: Store) -> None:
    time = FakeTime()
    holder = await hold(store, time)
    await holder.release()
    challenger = keeper(store, time, 2)
    assert (await challenger.challenge()) is None
    assert await is_fenced(holder)


async def test_a_holder_that_is_dead_for_certain_is_not_waited_for(store: Store) -> None:
    time = FakeTime()
    await hold(store, time)
    challenger = keeper(store, time, 2, gone=lambda process: process == own_identity())
    assert (await challenger.challenge()) is None


async def test_one_that_was_overtaken_never_writes_again(store: Store) -> None:
    time = FakeTime()
    first = await hold(store, time)
    second = keeper(store, time, 2)
    await second.acquire(waits_on=False)
    with pytest.raises(LeaseLostError, match="taken over by attempt 2 on "):
        await first.confirm()
    with pytest.raises(LeaseLostError):
        await first.renew()
    await first.release()
    assert (await lease_in(store)).writer_id == second.writer_id
    await second.confirm()


async def test_the_renewals_of_one_that_was_overtaken_end(store: Store) -> None:
    time, own = FakeTime(), FakeTime()
    first = await hold(store, own)
    await keeper(store, time, 2).acquire(waits_on=False)
    with pytest.raises(LeaseLostError):
        await first.keep()
    assert own.seconds == 15.0


async def test_a_living_holder_is_waited_for_until_it_ends(store: Store) -> None:
    time = FakeTime()
    holder = await hold(store, time)
    seen: set[str] = set()

    async def renew() -> None:
        if holder.held:
            await holder.renew()

    time.every = [(15.0, renew), (1000.0, holder.release)]
    challenger = keeper(store, time, 2)
    await challenger.acquire(waits_on=True, on_wait=lambda standing: seen.add(standing.describe()))
    assert 1000.0 <= time.seconds <= 1002.0
    assert seen == {f"attempt 1 on {os.uname().nodename} (pid {os.getpid()})"}


async def test_somebody_else_leaves_once_the_holder_is_seen_to_live(store: Store) -> None:
    time = FakeTime()
    holder = await hold(store, time)
    time.every = [(15.0, holder.renew)]
    with pytest.raises(LeaseHeldError, match=r"^held by attempt 1 on .*, which renews its lease"):
        await keeper(store, time, 2).acquire(waits_on=False)
    assert 60.0 <= time.seconds <= 62.0
    await holder.confirm()


async def test_of_two_challengers_one_gets_it(store: Store) -> None:
    time = FakeTime()
    await hold(store, time)
    second, third = keeper(store, time, 2), keeper(store, time, 3)
    await second.challenge()
    await third.challenge()
    time.seconds = 60.0
    answers = await asyncio.gather(second.challenge(), third.challenge())
    assert sorted(answer is None for answer in answers) == [False, True]
    winner, loser = (second, third) if answers[0] is None else (third, second)
    await winner.confirm()
    assert not loser.held


async def test_of_two_that_start_together_one_gets_it(store: Store) -> None:
    time = FakeTime()
    first, second = keeper(store, time, 1), keeper(store, time, 2)
    answers = await asyncio.gather(first.challenge(), second.challenge())
    assert sorted(answer is None for answer in answers) == [False, True]


async def test_a_lease_that_can_not_be_read_is_waited_for_like_any_other(store: Store) -> None:
    time = FakeTime()
    await store.put(LEASE, b'{"contract_version": "1.0", "torn')
    challenger = keeper(store, time, 2)
    standing = await challenger.challenge()
    assert standing is not None
    assert standing.describe() == "a runner whose lease can't be read"
    time.seconds = 60.0
    assert (await challenger.challenge()) is None


async def test_a_lease_that_somebody_deleted_is_lost(store: Store) -> None:
    holder = await hold(store, FakeTime())
    await store.delete(LEASE)
    with pytest.raises(LeaseLostError, match="the object is gone"):
        await holder.renew()


async def test_a_runner_of_an_earlier_generation_is_only_looked_for(store: Store) -> None:
    time = FakeTime()
    nobody = keeper(store, time, 9)
    await nobody.acquire(waits_on=True, create=False)
    assert [info.name async for info in store.list()] == []
    holder = await hold(store, time)
    await holder.release()
    released = await store.get(LEASE)
    await keeper(store, time, 9).acquire(waits_on=True, create=False)
    assert await store.get(LEASE) == released


async def test_a_silent_runner_of_an_earlier_generation_is_fenced_off(store: Store) -> None:
    time = FakeTime()
    old = await hold(store, time)
    new = keeper(store, time, 2)
    await new.acquire(waits_on=True, create=False)
    await new.release()
    assert await is_fenced(old)


# Storage that fails


async def test_a_holder_asks_before_it_writes_once_it_could_not_renew_in_time() -> None:
    store, time = FlakyStore(), FakeTime()
    holder = await hold(store, time)
    time.seconds = 44.9
    await holder.confirm()
    assert len(store.puts) == 1
    time.seconds = 45.0
    await holder.confirm()
    assert len(store.puts) == 2


async def test_a_holder_goes_on_after_an_outage_in_which_nobody_took_over() -> None:
    store, time = FlakyStore(), FakeTime()
    holder = await hold(store, time)
    store.away = True
    time.seconds = 600.0
    assert not holder.fresh
    with pytest.raises(StorageError, match="the store is away"):
        await holder.confirm()
    assert holder.held
    store.away = False
    await holder.confirm()
    assert holder.fresh


async def test_an_outage_does_not_count_against_the_holder() -> None:
    store, time = FlakyStore(), FakeTime()
    await hold(store, time)
    challenger = keeper(store, time, 2)
    await challenger.challenge()
    store.away = True
    time.seconds = 30.0
    with pytest.raises(StorageError):
        await challenger.challenge()
    store.away = False
    time.seconds = 61.0
    assert (await challenger.challenge()) is not None
    time.seconds = 120.9
    assert (await challenger.challenge()) is not None
    time.seconds = 121.0
    assert (await challenger.challenge()) is None


async def test_a_challenger_has_a_bounded_patience_with_storage() -> None:
    store, time = FlakyStore(), FakeTime()
    store.away = True
    with pytest.raises(StorageError, match="the store is away"):
        await keeper(store, time).acquire(waits_on=True, patience_seconds=300.0)
    assert 300.0 <= time.seconds <= 302.0


async def test_a_renewal_whose_reply_was_lost_is_ours() -> None:
    store, time = FlakyStore(), FakeTime()
    holder = await hold(store, time)
    store.lose_replies = 1
    with pytest.raises(StorageError, match="the reply was lost"):
        await holder.renew()
    await holder.renew()
    assert (await lease_in(store)).renewals == 2
    await holder.confirm()


async def test_a_first_put_whose_reply_was_lost_is_ours_at_the_next_look() -> None:
    store, time = FlakyStore(), FakeTime()
    store.lose_replies = 1
    writer = keeper(store, time)
    with pytest.raises(StorageError, match="the reply was lost"):
        await writer.challenge()
    assert not writer.held
    assert (await writer.challenge()) is None
    await writer.confirm()
    assert (await lease_in(store)).renewals == 1


async def test_a_take_over_whose_reply_was_lost_is_ours_and_fences_the_other() -> None:
    store, time = FlakyStore(), FakeTime()
    first = await hold(store, time)
    second = keeper(store, time, 2)
    await second.challenge()
    time.seconds = 60.0
    store.lose_replies = 1
    with pytest.raises(StorageError):
        await second.challenge()
    assert await is_fenced(first)
    assert (await second.challenge()) is None


async def test_renewals_go_on_after_a_store_was_away_and_are_tried_more_often_meanwhile() -> None:
    class LeavingError(Exception):
        pass

    class Moments(FakeTime):
        async def sleep(self, seconds: float) -> None:
            self.seconds += seconds
            moments.append(self.seconds)
            store.away = len(moments) < 4
            if len(moments) == 6:
                raise LeavingError

    moments: list[float] = []
    store, time = FlakyStore(), Moments()
    holder = await hold(store, time)
    with pytest.raises(LeavingError):
        await holder.keep()
    assert moments == [15.0, 20.0, 25.0, 30.0, 45.0, 60.0]
    assert holder.fresh


# A store that ignores conditions


async def test_without_conditions_two_that_start_together_find_each_other_out() -> None:
    store, time = UnconditionalStore(), FakeTime()
    first, second = keeper(store, time, 1, conditional=False), keeper(store, time, 2, conditional=False)
    answers = await asyncio.gather(first.challenge(), second.challenge())
    assert sorted(answer is None for answer in answers) == [False, True]
    assert time.seconds >= 2.0


async def test_without_conditions_a_holder_finds_at_its_next_renewal_that_it_was_overtaken() -> None:
    store, time = UnconditionalStore(), FakeTime()
    first = keeper(store, time, 1, conditional=False)
    await first.acquire(waits_on=False)
    second = keeper(store, time, 2, conditional=False)
    await second.acquire(waits_on=False)
    assert await is_fenced(first)
    await second.renew()
    assert (await lease_in(store)).writer_id == second.writer_id


# Processes


def test_a_process_is_known_by_more_than_its_number() -> None:
    own = own_identity()
    assert own is not None
    assert not is_gone(own)
    boot, namespace, pid, start = own.split()
    assert is_gone(f"{boot} {namespace} {pid} {int(start) + 1}")
    assert not is_gone(f"another-boot {namespace} {pid} {int(start) + 1}")
    assert not is_gone(f"{boot} 1 {pid} {int(start) + 1}")
    assert not is_gone(None)
    assert not is_gone("nonsense")


def test_a_process_that_ended_is_gone_also_before_it_is_waited_for() -> None:
    script = "from airflow_vllm_batch.storage.processes import own_identity; print(own_identity())"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    identity = child.stdout.read().strip()  # to the end of file: the child has ended
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(identity)
    child.wait()
    assert is_gone(identity)
