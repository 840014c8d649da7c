"""A try that dies at any moment, by dying at every single one: what it left, and what the next try makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import ExitCode
from airflow_vllm_batch.runner.segments import BadSegmentError, decode_row, unpack
from airflow_vllm_batch.storage.base import ObjectInfo
from airflow_vllm_batch.storage.memory import MemoryStore
from tests.support.runs import LocalRun, ScriptedEngine, chat

ROWS = 12
IDS = [f"r{number}" for number in range(ROWS)]


class Death(BaseException):
    """The process is gone: nothing that it would still do happens."""


class MortalStore(MemoryStore):
    """Dies with its process at one operation, before or after that took effect; later ones find it dead.

    :param torn: the put at which it dies leaves half of the object, as on a disk that promises less than it should.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, str]] = []
        self.dies_at: int | None = None
        self.after = False
        self.torn = False

    def revive(self) -> None:
        self.operations, self.dies_at = [], None

    async def before(self, operation: str, name: str) -> None:
        self.operations.append((operation, name))
        if self.dies_at is None or len(self.operations) < self.dies_at:
            return
        if len(self.operations) > self.dies_at or not (self.after or self.torn):
            raise Death

    def _keep(self, name: str, data: bytes) -> ObjectInfo:
        dying = self.dies_at is not None and len(self.operations) == self.dies_at
        info = super()._keep(name, data[: len(data) // 2] if dying and self.torn else data)
        if dying:
            raise Death
        return info

    def rows_kept(self) -> set[str]:
        """Return the ids of all rows in whole segments."""
        kept: set[str] = set()
        for name, (data, _) in self._objects.items():
            if "/segments/" in name:
                try:
                    rows = unpack(data)[1]
                except BadSegmentError:
                    continue
                kept |= {str(decode_row(line).custom_id) for line in rows.splitlines()}
        return kept


def twelve(tmp_path: Path) -> LocalRun:
    return LocalRun(tmp_path, [chat(name, name) for name in IDS])


async def operations_of_a_run(tmp_path: Path) -> list[tuple[str, str]]:
    store = MortalStore()
    await twelve(tmp_path).run(ScriptedEngine(), store=store, checkpoint_rows=3, max_in_flight=1)
    return store.operations


async def die_and_go_on(root: Path, dies_at: int, *, after: bool, torn: bool) -> None:
    root.mkdir()
    run, store, first = twelve(root), MortalStore(), ScriptedEngine()
    store.dies_at, store.after, store.torn = dies_at, after, torn
    with pytest.raises(Death):
        await run.run(first, store=store, checkpoint_rows=3, max_in_flight=1)
    kept = store.rows_kept()
    store.revive()
    second = ScriptedEngine()
    exit_code, manifest = await run.run(second, store=store, checkpoint_rows=3, max_in_flight=1)
    assert exit_code is ExitCode.PASSED
    assert [json.loads(line)["custom_id"] for line in (await store.get("output.jsonl")).splitlines()] == IDS
    # Not one row that was kept is asked again, and every other one once.
    assert set(second.asked) == set(IDS) - kept
    assert set(second.asked.values()) <= {1}
    assert manifest.rows_reused == len(kept)
    assert second.starts == (len(kept) < ROWS)


@pytest.mark.parametrize(("after", "torn"), [(False, False), (True, False), (False, True)])
async def test_a_try_that_dies_at_any_operation_is_finished_by_the_next(
    tmp_path: Path, after: bool, torn: bool
) -> None:
    operations = await operations_of_a_run(tmp_path)
    assert len(operations) >= 8
    for number, (operation, name) in enumerate(operations, start=1):
        writes = operation.startswith("put")
        if (after or torn) and not writes:
            continue
        if torn and "/segments/" not in name and name not in {"output.jsonl", "errors.jsonl"}:
            continue  # documents are small: no store writes half of one
        await die_and_go_on(tmp_path / f"{number}", number, after=after, torn=torn)


@pytest.mark.parametrize("name", ["output.jsonl", "errors.jsonl", "manifest.json"])
async def test_a_death_in_an_upload_or_before_the_manifest_costs_no_engine_start(tmp_path: Path, name: str) -> None:
    operations = await operations_of_a_run(tmp_path)
    root = tmp_path / "again"
    root.mkdir()
    run, store = twelve(root), MortalStore()
    store.dies_at = max(at for at, (what, of) in enumerate(operations, start=1) if what != "head" and of == name)
    with pytest.raises(Death):
        await run.run(ScriptedEngine(), store=store, checkpoint_rows=3, max_in_flight=1)
    store.revive()
    engine = ScriptedEngine()
    exit_code, _ = await run.run(engine, store=store)
    assert (exit_code, engine.starts) == (ExitCode.PASSED, 0)
