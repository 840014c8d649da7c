"""What a run folder tells of its tries: who ended how, when an epoch began, which one is the newest."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_vllm_batch.contract import AttemptRecord, CancelRequest, OutputTarget
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.run_folder import RunFolder


def at(minute: int) -> datetime:
    return datetime(2026, 1, 2, 3, minute, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(Access.ambient(), OutputTarget(uri=f"{tmp_path}/out/", state_uri=f"{tmp_path}/out/"))


async def attempt(folder: RunFolder, minute: int, **fields: Any) -> AttemptRecord:
    return await folder.start_attempt(
        lambda number: AttemptRecord(
            run_key="a-run", generation=1, number=number, started_by="test", started_at=at(minute), **fields
        )
    )


async def test_earlier_tries_without_an_end_are_completed_and_others_left_alone(folder: RunFolder) -> None:
    await attempt(folder, 0)
    await attempt(folder, 1)
    await folder.complete_attempt(2, ended_at=at(2), exit_code=75, reason="stopped", final=False)
    await attempt(folder, 3)
    await attempt(folder, 4)
    await folder.record_deaths(before=3, now=at(9))
    records = [await folder.read_attempt(number) for number in (1, 2, 3, 4)]
    assert [(record.ended_at, record.exit_code, record.reason) for record in records if record] == [
        (at(9), None, "ended without a word; found by a later try"),
        (at(2), 75, "stopped"),
        (None, None, None),
        (None, None, None),
    ]


async def test_an_end_that_was_only_presumed_gives_way_to_the_real_one(folder: RunFolder) -> None:
    await attempt(folder, 0)
    await folder.record_deaths(before=2, now=at(1))
    await folder.record_deaths(before=3, now=at(2))
    record = await folder.complete_attempt(1, ended_at=at(3), exit_code=73, reason="taken over", final=False)
    assert record is not None
    assert (record.ended_at, record.exit_code, record.reason) == (at(3), 73, "taken over")
    await folder.complete_attempt(1, ended_at=at(4), exit_code=-9, reason="killed", final=False)
    assert await folder.read_attempt(1) == record


async def test_an_epoch_began_with_its_first_try(folder: RunFolder) -> None:
    assert await folder.epoch_began_at(0) is None
    for minute, epoch in ((1, 0), (2, 0), (3, 1), (4, 1)):
        await attempt(folder, minute, epoch=epoch)
    assert [await folder.epoch_began_at(epoch) for epoch in (0, 1, 2)] == [at(1), at(3), None]


async def test_a_try_that_left_since_another_held_the_run_is_not_the_newest_one(folder: RunFolder) -> None:
    await attempt(folder, 0)
    await attempt(folder, 1)
    await folder.complete_attempt(2, ended_at=at(2), exit_code=73, reason="held", final=False)
    newest = await folder.newest_attempt()
    assert newest is not None
    assert newest.number == 1


async def test_a_cancel_request_is_read_as_it_was_written(folder: RunFolder) -> None:
    request = CancelRequest(attempt=2, requested_at=at(1), requested_by="ann", reason="wrong model")
    assert await folder.read_cancel() is None
    await folder.write_cancel(request)
    assert await folder.read_cancel() == request


async def test_a_lease_that_can_not_be_read_tells_nothing(folder: RunFolder) -> None:
    assert await folder.read_lease() is None
    await folder.store.put(folder.layout.lease(), b"{torn")
    assert await folder.read_lease() is None
