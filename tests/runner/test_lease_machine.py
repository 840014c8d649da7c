"""Random runners on one folder that work, freeze, wake and die, on storage that loses replies and damages objects.

Lease, segments, reuse and merge are the real ones; what stands between them in a runner is played by the rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from airflow_vllm_batch.contract import Lease, Outcome, RunLayout
from airflow_vllm_batch.runner.merge import merge
from airflow_vllm_batch.runner.plan import Plan
from airflow_vllm_batch.runner.results import ResultWriter
from airflow_vllm_batch.runner.reuse import reuse_segments
from airflow_vllm_batch.runner.segments import (
    BadSegmentError,
    ResultFile,
    SegmentHeader,
    body_digest,
    decode_row,
    digest_rows,
    encode_row,
    pack,
    unpack,
)
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.lease import LeaseKeeper, LeaseLostError
from tests.support.leases import LEASE, FakeTime, FlakyStore, keeper
from tests.support.runs import chat, write_lines

ROWS = 10
IDS = [f"r{number}" for number in range(ROWS)]
LAYOUT = RunLayout(1)
Found = TypeVar("Found")


@dataclass
class Runner:
    """One process."""

    attempt: int
    keeper: LeaseKeeper
    frozen: bool = False
    reusable: set[str] | None = None
    """Rows that were in whole segments when it planned; null before that."""
    plan: Plan | None = None
    results: ResultFile | None = None
    sequence: int = 0
    in_hand: tuple[str, bytes] | None = None
    """A segment between the check of the lease and its put."""
    uploading: bytes | None = None
    """The output between the check and its put."""
    uploaded: str | None = None
    asked: Counter[str] = field(default_factory=Counter)


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="lease-machine-"))
        write_lines(self.folder / "in.jsonl", [chat(name, name) for name in IDS])
        self.store = FlakyStore()
        self.time = FakeTime()
        self.runners: list[Runner] = []
        self.attempts = 0
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        try:
            self.finish_for_good()
        finally:
            for runner in self.runners:
                self._close(runner)
            self.loop.close()
            shutil.rmtree(self.folder)

    def _do(self, coroutine: object) -> object:
        return self.loop.run_until_complete(coroutine)  # type: ignore[arg-type]

    # What a runner does by itself

    def _challenge(self, runner: Runner) -> None:
        try:
            standing = self._do(runner.keeper.challenge())
        except StorageError:
            return
        if standing is None and runner.plan is None:
            self._plan(runner)

    def _plan(self, runner: Runner) -> None:
        folder = self.folder / f"{runner.attempt}"
        folder.mkdir(exist_ok=True)
        spool = self.folder / "in.jsonl"
        runner.plan, runner.results = Plan(spool), ResultFile(folder / "results.jsonl")
        runner.plan.begin_input()
        offset = 0
        for line, raw in enumerate(spool.read_bytes().splitlines(keepends=True), start=1):
            runner.plan.add(line, offset, len(raw) - 1)
            offset += len(raw)
        found = self._do(
            reuse_segments(
                self.store,
                LAYOUT,
                runner.plan,
                runner.results,
                run_key="a-run",
                spec_digest="s",
                epoch=0,
                attempt=runner.attempt,
            )
        )
        runner.results.close_range()
        runner.reusable = self._kept()
        assert found.rows == len(runner.reusable)  # type: ignore[attr-defined]

    def _kept(self) -> set[str]:
        kept: set[str] = set()
        for name in [info.name for info in self._list(LAYOUT.segments)]:
            try:
                rows = unpack(bytes(self._do(self.store.get(name))))[1]  # type: ignore[arg-type]
            except BadSegmentError:
                continue
            kept |= {str(decode_row(line).custom_id) for line in rows.splitlines()}
        return kept

    def _list(self, prefix: str) -> list[object]:
        async def read() -> list[object]:
            return [info async for info in self.store.list(prefix)]

        return self._do(read())  # type: ignore[return-value]

    def _may_write(self, runner: Runner) -> bool:
        try:
            self._do(runner.keeper.confirm())
        except (StorageError, LeaseLostError):
            return False
        lease = Lease.read(bytes(self._do(self.store.get(LEASE))), LEASE)  # type: ignore[arg-type]
        assert lease.writer_id == runner.keeper.writer_id
        return True

    def _answer(self, runner: Runner, rows: int) -> None:
        """Answer some rows and pack them; the put comes later."""
        assert runner.plan is not None
        assert runner.results is not None
        writer = ResultWriter("a-run", 1)
        for index in list(runner.plan.left())[:rows]:
            job = runner.plan.job(index)
            runner.asked[job.custom_id] += 1
            result = writer.line(0, runner.plan.key(index).line, job.custom_id, None, None)
            line = encode_row(
                input_index=0,
                line=runner.plan.key(index).line,
                custom_id=job.custom_id,
                digest=body_digest(job.endpoint, job.body),
                spec_digest="s",
                outcome=Outcome.FAILED,
                attempts=1,
                code="engine_crash",
                status_code=None,
                epoch=0,
                result=result,
            )
            runner.plan.record(index, runner.results.append(line))
        closed = runner.results.close_range()
        raw = runner.results.read(closed)
        header = SegmentHeader("a-run", 1, runner.attempt, "s", closed.rows, digest_rows(raw))
        runner.sequence += 1
        runner.in_hand = (LAYOUT.segment(runner.attempt, runner.sequence), pack(header, raw))

    def _put_in_hand(self, runner: Runner) -> None:
        assert runner.in_hand is not None
        try:
            self._do(self.store.put_new(*runner.in_hand))
        except StorageError:
            return  # tried again with the same bytes
        runner.in_hand = None

    def _merged(self, runner: Runner) -> bytes:
        assert runner.plan is not None
        assert runner.results is not None
        target = self.folder / f"{runner.attempt}"
        merge(runner.plan, runner.results, target, one_file=False, looks_at_forms=False)
        return (target / "errors.jsonl").read_bytes()

    def _close(self, runner: Runner) -> None:
        if runner.plan is not None and runner.results is not None:
            runner.plan.close()
            runner.results.close()
            runner.plan = None

    def _draw(self, number: int) -> Runner:
        return self.runners[number % len(self.runners)]

    # Rules

    @precondition(lambda self: len(self.runners) < 4)
    @rule()
    def start(self) -> None:
        self.attempts += 1
        runner = Runner(self.attempts, keeper(self.store, self.time, self.attempts))
        self.runners.append(runner)
        self._challenge(runner)

    @rule(steps=st.integers(1, 14))
    def time_passes(self, steps: int) -> None:
        """Let five seconds pass, again and again: who waits looks, who holds renews every fifteen."""
        for _ in range(steps):
            self.time.seconds += 5.0
            for runner in self.runners:
                if runner.frozen:
                    continue
                if runner.plan is None:
                    self._challenge(runner)
                elif self.time.seconds % 15.0 == 0.0 and runner.keeper.held:
                    try:
                        self._do(runner.keeper.renew())
                    except (StorageError, LeaseLostError):
                        continue

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3), rows=st.integers(1, 4), freezes=st.booleans())
    def work(self, number: int, rows: int, freezes: bool) -> None:
        runner = self._draw(number)
        if runner.frozen or runner.plan is None or not self._may_write(runner):
            return
        if runner.in_hand is None:
            if not runner.plan.count_left():
                return
            self._answer(runner, rows)
        if freezes:
            runner.frozen = True  # between the check and the put
            return
        self._put_in_hand(runner)

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3), freezes=st.booleans())
    def upload(self, number: int, freezes: bool) -> None:
        runner = self._draw(number)
        if runner.frozen or runner.plan is None or runner.plan.count_left() or runner.in_hand is not None:
            return
        if not self._may_write(runner):
            return
        runner.uploading = self._merged(runner)
        if freezes:
            runner.frozen = True
            return
        self._finish_upload(runner)

    def _finish_upload(self, runner: Runner) -> None:
        assert runner.uploading is not None
        digest = hashlib.sha256(runner.uploading).hexdigest()
        try:
            self._do(self.store.put(LAYOUT.errors, runner.uploading))
        except StorageError:
            return
        runner.uploading, runner.uploaded = None, digest

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3))
    def write_manifest(self, number: int) -> None:
        runner = self._draw(number)
        if runner.frozen or runner.uploaded is None or not self._may_write(runner):
            return
        try:
            self._do(self.store.put(LAYOUT.manifest, json.dumps([runner.attempt, runner.uploaded]).encode()))
        except StorageError:
            return
        self._do(runner.keeper.release())
        self._end(runner)

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3))
    def freeze(self, number: int) -> None:
        self._draw(number).frozen = True

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3))
    def wake(self, number: int) -> None:
        """Go on where it froze: a write that was under way ends, whoever holds the lease by now."""
        runner = self._draw(number)
        if not runner.frozen:
            return
        runner.frozen = False
        if runner.in_hand is not None:
            self._put_in_hand(runner)
        if runner.uploading is not None:
            self._finish_upload(runner)

    @precondition(lambda self: self.runners)
    @rule(number=st.integers(0, 3))
    def kill(self, number: int) -> None:
        self._end(self._draw(number))

    def _end(self, runner: Runner) -> None:
        self._close(runner)
        self.runners.remove(runner)

    @rule()
    def lose_a_reply(self) -> None:
        self.store.lose_replies = 1

    @rule(number=st.integers(0, 100))
    def damage_a_segment(self, number: int) -> None:
        names = [info.name for info in self._list(LAYOUT.segments)]  # type: ignore[attr-defined]
        if names:
            name = names[number % len(names)]
            data = bytes(self._do(self.store.get(name)))  # type: ignore[arg-type]
            lost, self.store.lose_replies = self.store.lose_replies, 0
            self._do(self.store.put(name, data[: len(data) // 2]))
            self.store.lose_replies = lost

    # What is always true

    @invariant()
    def never_more_than_one_may_write_without_asking(self) -> None:
        assert sum(runner.keeper.fresh for runner in self.runners) <= 1

    @invariant()
    def no_row_that_was_kept_is_asked_again(self) -> None:
        for runner in self.runners:
            if runner.reusable is not None:
                assert not set(runner.asked) & runner.reusable
                assert set(runner.asked.values()) <= {1}

    @invariant()
    def whoever_takes_a_run_for_done_finds_every_row_once(self) -> None:
        objects = {info.name for info in self._list("")}  # type: ignore[attr-defined]
        if LAYOUT.manifest not in objects or LAYOUT.errors not in objects:
            return
        output = bytes(self._do(self.store.get(LAYOUT.errors)))  # type: ignore[arg-type]
        named = json.loads(bytes(self._do(self.store.get(LAYOUT.manifest))))[1]  # type: ignore[arg-type]
        if hashlib.sha256(output).hexdigest() == named:
            assert [json.loads(line)["custom_id"] for line in output.splitlines()] == IDS

    def finish_for_good(self) -> None:
        """Everybody dies, and one more runner ends the run: it asks just the rows that nobody kept."""
        for runner in list(self.runners):
            self._end(runner)
        self.store.lose_replies = 0
        kept = self._kept()
        self.start()
        (last,) = self.runners
        for _ in range(13):
            if last.plan is None:
                self.time_passes(1)
        assert last.plan is not None
        while last.plan.count_left():
            self.work(0, 4, freezes=False)
        self.upload(0, freezes=False)
        assert last.uploaded is not None
        assert set(last.asked) == set(IDS) - kept
        self.write_manifest(0)
        output = bytes(self._do(self.store.get(LAYOUT.errors)))  # type: ignore[arg-type]
        assert [json.loads(line)["custom_id"] for line in output.splitlines()] == IDS


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
