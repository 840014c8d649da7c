"""Storage that goes away while rows run, says no, or never comes back; a local disk that fills up meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import ExitCode, InputFile
from airflow_vllm_batch.runner.engine.base import Reply
from airflow_vllm_batch.runner.errors import LocalDiskError, StoppedError
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.segments import unpack
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.base import StorageError, StorageRefusedError
from airflow_vllm_batch.storage.memory import MemoryStore
from tests.support.leases import FakeTime
from tests.support.runs import LocalRun, ScriptedEngine, answer, chat


class AwayStore(MemoryStore):
    """A store whose puts fail while ``away`` says so."""

    def __init__(self, away: Callable[[str], bool], error: Exception | None = None) -> None:
        super().__init__()
        self.away = away
        self.error = error or StorageError("the store is away")
        self.refused = 0

    async def before(self, operation: str, name: str) -> None:
        if operation.startswith("put") and self.away(name):
            self.refused += 1
            raise self.error

    async def names(self, prefix: str) -> list[str]:
        return [info.name async for info in self.list(prefix)]

    async def rows(self) -> list[str]:
        return [json.loads(line)["custom_id"] for line in (await self.get("output.jsonl")).splitlines()]


def is_segment(name: str) -> bool:
    return "/segments/" in name


def twenty(tmp_path: Path) -> LocalRun:
    return LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(20)])


TWENTY = [f"r{number}" for number in range(20)]


def patience(time: FakeTime) -> Patience:
    return Patience(clock=time.clock, sleep=time.sleep, jitter=lambda: 1.0)


async def test_rows_go_on_while_storage_is_away_and_everything_is_put_afterwards(tmp_path: Path) -> None:
    run = twenty(tmp_path)
    all_asked = threading.Event()
    engine = ScriptedEngine()

    def script(text: str, before: int) -> Reply:
        if engine.asked.total() == 20:
            all_asked.set()
        return Reply(200, answer(text))

    async def until_all_are_asked(seconds: float) -> None:
        await asyncio.to_thread(all_asked.wait)

    engine.script = script
    store = AwayStore(lambda name: is_segment(name) and not (store.refused and all_asked.is_set()))
    exit_code, manifest = await run.run(
        engine, store=store, checkpoint_rows=2, max_in_flight=1, patience=Patience(sleep=until_all_are_asked)
    )
    assert (exit_code, await store.rows()) == (ExitCode.PASSED, TWENTY)
    assert store.refused >= 1
    # What waited goes together, or thousands of small objects would follow a long outage.
    assert len(await store.names("_vllm_batch/1/segments/")) <= 3
    again = ScriptedEngine()
    _, manifest = await run.run(again, store=store)
    assert (again.starts, manifest.rows_reused) == (0, 20)


async def test_storage_that_stays_away_ends_the_run_after_half_an_hour_and_the_next_try_goes_on(tmp_path: Path) -> None:
    run, time = twenty(tmp_path), FakeTime()
    engine = ScriptedEngine()
    store = AwayStore(lambda name: is_segment(name) and name.endswith("-000003.jsonl.zst"))
    with pytest.raises(StorageError, match=r"storage was away for 18[0-9][0-9] s: the store is away"):
        await run.run(engine, store=store, checkpoint_rows=2, max_in_flight=1, patience=patience(time))
    assert engine.stops == 1
    store.away = lambda name: False
    again = ScriptedEngine()
    exit_code, manifest = await run.run(again, store=store)
    assert (exit_code, manifest.rows_reused, again.asked.total()) == (ExitCode.PASSED, 4, 16)
    assert await store.rows() == TWENTY


async def test_storage_that_says_no_ends_the_run_after_five_minutes(tmp_path: Path) -> None:
    run, time = twenty(tmp_path), FakeTime()
    store = AwayStore(is_segment, StorageRefusedError("permission denied"))
    with pytest.raises(StorageRefusedError, match="permission denied"):
        await run.run(ScriptedEngine(), store=store, patience=patience(time))
    assert 300.0 <= time.seconds < 330.0


@pytest.mark.parametrize("name", ["output.jsonl", "errors.jsonl", "manifest.json"])
async def test_an_upload_waits_for_storage_without_the_engine(tmp_path: Path, name: str) -> None:
    run, time = twenty(tmp_path), FakeTime()
    engine = ScriptedEngine()
    store = AwayStore(lambda put: put == name and time.seconds < 600.0)
    stops: list[int] = []

    async def sleep(seconds: float) -> None:
        stops.append(engine.stops)
        await time.sleep(seconds)

    exit_code, _ = await run.run(
        engine, store=store, patience=Patience(clock=time.clock, sleep=sleep, jitter=lambda: 1.0)
    )
    assert (exit_code, await store.rows()) == (ExitCode.PASSED, TWENTY)
    assert set(stops) == {1}


async def test_an_upload_that_fails_for_good_says_that_nothing_has_to_run_again(tmp_path: Path) -> None:
    run, time = twenty(tmp_path), FakeTime()
    store = AwayStore(lambda name: name == "output.jsonl")
    with pytest.raises(StorageError, match=r"Every row is finished and kept in .*uploads without starting an engine"):
        await run.run(ScriptedEngine(), store=store, patience=patience(time))
    store.away = lambda name: False
    again = ScriptedEngine()
    assert (await run.run(again, store=store))[0] is ExitCode.PASSED
    assert (again.starts, await store.rows()) == (0, TWENTY)


async def test_a_run_that_ends_while_its_inputs_are_read_puts_no_segment(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, ["{broken", chat("a", "one")])
    inputs = (InputFile(uri=str(run.input)), InputFile(uri=f"{tmp_path}/missing.jsonl"))
    store = MemoryStore()
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        await run.run(ScriptedEngine(), store=store, inputs=inputs)
    assert [info async for info in store.list("_vllm_batch/1/segments/")] == []


class EndlessEngine(ScriptedEngine):
    """Answers so many rows, and is busy with the next one for ever."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    async def send(self, endpoint: str, body: bytes) -> Reply:
        if self.asked.total() >= self.rows:
            await asyncio.Event().wait()
        return await super().send(endpoint, body)


@pytest.mark.parametrize(
    ("limits", "free", "words"),
    [
        ({"spool_bytes": 100}, 500_000_000_000, "more than spool_bytes=100"),
        ({}, 1_000_000_000, "has only 1,000 MB left"),
    ],
)
async def test_at_the_bound_of_the_disk_rows_stop_and_what_waits_is_put_once_storage_is_back(
    tmp_path: Path, limits: dict[str, int], free: int, words: str
) -> None:
    run = twenty(tmp_path)
    engine = EndlessEngine(6)
    store = AwayStore(lambda name: is_segment(name) and not engine.stops)
    with pytest.raises(LocalDiskError, match=words):
        await run.run(
            engine,
            store=store,
            max_in_flight=1,
            checkpoint_seconds=0.01,
            patience=Patience(sleep=lambda seconds: asyncio.sleep(0.001)),
            disk_usage=lambda folder: (1_000_000_000_000, 0, free),
            **limits,
        )
    again = ScriptedEngine()
    exit_code, manifest = await run.run(again, store=store)
    assert (exit_code, manifest.rows_reused, again.asked.total()) == (ExitCode.PASSED, 6, 14)


async def test_a_full_disk_is_no_reason_to_stop_while_storage_takes_everything(tmp_path: Path) -> None:
    run = twenty(tmp_path)
    exit_code, _ = await run.run(ScriptedEngine(), checkpoint_seconds=0.001, disk_usage=lambda folder: (100, 100, 0))
    assert exit_code is ExitCode.PASSED


async def test_a_stop_while_storage_is_away_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_vllm_batch.runner.pipeline.LAST_CHECKPOINT_SECONDS", 0.01)
    run, stop = twenty(tmp_path), StopSignal()
    store = AwayStore(is_segment)

    async def stop_meanwhile(seconds: float) -> None:
        stop.request("received SIGTERM")
        await asyncio.Event().wait()

    with pytest.raises(StoppedError, match=r"received SIGTERM; 0\.0 MB of finished rows could not be put"):
        await run.run(
            EndlessEngine(6),
            store=store,
            stop=stop,
            checkpoint_rows=2,
            max_in_flight=1,
            patience=Patience(sleep=stop_meanwhile),
        )
    store.away = lambda name: False
    again = ScriptedEngine()
    assert (await run.run(again, store=store))[0] is ExitCode.PASSED
    assert (again.asked.total(), await store.rows()) == (20, TWENTY)


async def test_a_segment_whose_reply_was_lost_is_put_once(tmp_path: Path) -> None:
    class Deaf(MemoryStore):
        deaf = True

        async def put_new(self, name: str, data: bytes) -> object:  # type: ignore[override]
            info = await super().put_new(name, data)
            if is_segment(name) and self.deaf:
                self.deaf = False
                raise StorageError("the reply was lost")
            return info

    run, time, store = twenty(tmp_path), FakeTime(), Deaf()
    exit_code, _ = await run.run(ScriptedEngine(), store=store, checkpoint_rows=5, patience=patience(time))
    assert exit_code is ExitCode.PASSED
    segments = [await store.get(info.name) async for info in store.list("_vllm_batch/1/segments/")]
    assert sum(unpack(segment)[0].rows for segment in segments) == 20
