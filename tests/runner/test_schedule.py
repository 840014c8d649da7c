"""The bounded window and the row retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.contract import ErrorCode, Outcome
from airflow_vllm_batch.runner.engine.base import ConnectionLostError, EngineInfo, EngineStats, Refusal, Reply
from airflow_vllm_batch.runner.errors import EngineDownError, ServerRefusesError
from airflow_vllm_batch.runner.results import Finished, Job
from airflow_vllm_batch.runner.schedule import RestartPolicy, RetryPolicy, Scheduler

OK = Reply(200, b"{}")


class Engine:
    """Answers by a script of one function; ``gate`` holds every answer back."""

    def __init__(self, script: Callable[[bytes, int], Reply], gate: asyncio.Event | None = None) -> None:
        self.script = script
        self.gate = gate
        self.asked: dict[bytes, int] = {}
        self.inside = 0
        self.most_inside = 0
        self.full = asyncio.Event()
        self.window = 0
        self.refusal: Refusal | None = None
        self.dead = False
        self.restarts = 0
        self.mark: int | None = 0
        self.alone: list[bytes] = []
        """Rows that were asked for while nothing else was in the engine."""

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        return self.refusal

    async def send(self, endpoint: str, body: bytes) -> Reply:
        if self.dead:
            raise EngineDownError("dead")
        before = self.asked.get(body, 0)
        self.asked[body] = before + 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        if self.inside == self.window:
            self.full.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.dead:
                raise EngineDownError("dead")
            if self.inside == 1:
                self.alone.append(body)
            return self.script(body, before)
        except EngineDownError:
            self.dead = True
            raise
        finally:
            self.inside -= 1

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def down(self) -> bool:
        return self.dead

    def progress_mark(self) -> int | None:
        return self.mark

    def give_up(self, reason: str) -> None:
        self.dead = True

    async def restart(self) -> None:
        self.restarts += 1
        self.dead = False

    async def stop(self) -> None:
        return None


class Feed:
    """Counts how far it was read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read = 0

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Job:
        if self.read == self.rows:
            raise StopIteration
        self.read += 1
        return Job(self.read - 1, f"row-{self.read - 1}", "/v1/completions", b"%d" % (self.read - 1))


class Pauses:
    """Stands in for sleep: remembers, and does not wait."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


async def run(engine: Engine, rows: int = 1, window: int = 4, **policy: float) -> tuple[list[Finished], list[float]]:
    finished: list[Finished] = []
    pauses = Pauses()
    await Scheduler(engine, finished.append, window, RetryPolicy(**policy), sleep=pauses, jitter=lambda: 1.0).run(
        Feed(rows)
    )
    return finished, pauses.seconds


async def test_the_input_is_never_read_further_than_the_engine_can_take() -> None:
    feed, gate = Feed(100), asyncio.Event()
    engine = Engine(lambda *_: OK, gate)
    engine.window = 4
    finished: list[Finished] = []
    running = asyncio.create_task(Scheduler(engine, finished.append, 4).run(feed))
    await engine.full.wait()
    assert feed.read == 4
    gate.set()
    await running
    assert (len(finished), engine.most_inside, feed.read) == (100, 4, 100)


async def test_every_row_ends_once_whatever_the_window() -> None:
    for window in (1, 3, 7, 50):
        finished, _ = await run(Engine(lambda *_: OK), rows=20, window=window)
        assert sorted(end.job.custom_id for end in finished) == sorted(f"row-{number}" for number in range(20))


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504])
async def test_a_passing_refusal_is_sent_again_with_back_off(status: int) -> None:
    engine = Engine(lambda _, before: OK if before == 2 else Reply(status, b"{}"))
    finished, pauses = await run(engine, retries=3)
    assert [(end.outcome, end.attempts) for end in finished] == [(Outcome.SUCCEEDED, 3)]
    assert pauses == [0.5, 1.0]


@pytest.mark.parametrize("status", [400, 404, 413, 415, 422])
async def test_a_final_refusal_is_sent_once(status: int) -> None:
    engine = Engine(lambda *_: Reply(status, b'{"error":{"message":"no such thing"}}'))
    finished, pauses = await run(engine)
    assert [(end.outcome, end.attempts, end.code, end.message) for end in finished] == [
        (Outcome.FAILED, 1, ErrorCode.ENGINE_REJECTED, "no such thing")
    ]
    assert pauses == []


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply(429, b'{"error":{"message":"slow down"}}'), ErrorCode.RATE_LIMITED),
        (Reply(500, b'{"error":{"message":"slow down"}}'), ErrorCode.SERVER_ERROR),
        (Reply(408, b'{"message":"slow down"}'), ErrorCode.TIMEOUT),
    ],
)
async def test_a_row_that_never_succeeds_keeps_its_last_error_and_says_how_often_it_was_sent(
    reply: Reply, code: ErrorCode
) -> None:
    finished, _ = await run(Engine(lambda *_: reply), retries=2)
    (end,) = finished
    assert (end.outcome, end.attempts, end.code, end.message, end.reply) == (
        Outcome.FAILED,
        3,
        code,
        "slow down (sent 3 times)",
        reply,
    )


async def test_a_lost_connection_counts_as_passing() -> None:
    def lose(body: bytes, before: int) -> Reply:
        if before == 0:
            raise ConnectionLostError("reset by peer")
        return OK

    finished, _ = await run(Engine(lose))
    assert [(end.outcome, end.attempts) for end in finished] == [(Outcome.SUCCEEDED, 2)]


async def test_a_row_without_an_answer_in_time_is_a_timeout() -> None:
    engine = Engine(lambda *_: OK, asyncio.Event())
    finished, _ = await run(engine, retries=1, row_timeout_seconds=0.01)
    (end,) = finished
    assert (end.outcome, end.attempts, end.code, end.message) == (
        Outcome.FAILED,
        2,
        ErrorCode.TIMEOUT,
        "no answer within 0.01 s (sent 2 times)",
    )


async def test_the_pause_is_at_least_what_the_server_asks_for() -> None:
    engine = Engine(lambda _, before: OK if before else Reply(429, b"{}", retry_after_seconds=17.0))
    _, pauses = await run(engine)
    assert pauses == [17.0]


async def test_a_pause_without_end_is_bounded() -> None:
    engine = Engine(lambda _, before: OK if before else Reply(503, b"{}", retry_after_seconds=1e9))
    _, pauses = await run(engine)
    assert pauses == [600.0]


def test_pauses_double_up_to_their_bound_and_are_spread_over_their_upper_half() -> None:
    policy = RetryPolicy()
    assert [policy.delay(sent, None, 1.0) for sent in range(1, 9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert policy.delay(3, None, 0.0) == 1.0


async def test_what_the_engine_refuses_before_it_is_sent_is_an_invalid_row() -> None:
    engine = Engine(lambda *_: OK)
    engine.refusal = Refusal(ErrorCode.UNSUPPORTED_URL, "url: not served")
    finished, _ = await run(engine)
    assert [(end.outcome, end.attempts, end.code) for end in finished] == [
        (Outcome.INVALID, 0, ErrorCode.UNSUPPORTED_URL)
    ]
    assert engine.asked == {}


async def test_a_server_that_refuses_us_ends_the_schedule_and_no_row_is_collected_twice() -> None:
    def refuse(body: bytes, before: int) -> Reply:
        if body == b"5":
            raise ServerRefusesError("401")
        return OK

    finished: list[Finished] = []
    with pytest.raises(ServerRefusesError, match="401"):
        await Scheduler(Engine(refuse), finished.append, 4).run(Feed(50))
    ids = [end.job.custom_id for end in finished]
    assert len(ids) == len(set(ids))
    assert "row-5" not in ids


def poisoned(*poison: int) -> Engine:
    def script(body: bytes, before: int) -> Reply:
        if int(body) in poison:
            raise EngineDownError("killed by a row")
        return OK

    return Engine(script)


def ends(finished: list[Finished]) -> dict[int, tuple[Outcome, ErrorCode | None]]:
    found = {end.job.row: (end.outcome, end.code) for end in finished}
    assert len(found) == len(finished), "a row ended twice"
    return found


@pytest.mark.parametrize("window", [1, 2, 9, 16])
async def test_a_row_that_kills_the_engine_is_found_and_every_other_row_succeeds(window: int) -> None:
    engine = poisoned(7)
    finished, _ = await run(engine, rows=40, window=window)
    expected = dict.fromkeys(range(40), (Outcome.SUCCEEDED, None))
    assert ends(finished) == {**expected, 7: (Outcome.FAILED, ErrorCode.ENGINE_CRASH)}
    # It had its two chances alone, and nobody else is blamed for it.
    assert engine.alone.count(b"7") >= 2
    (crash,) = (end for end in finished if end.code is ErrorCode.ENGINE_CRASH)
    assert crash.message == "the engine died 2 times while this row alone was in it"
    assert crash.reply is None


async def test_several_poisoned_rows_are_all_found() -> None:
    finished, _ = await run(poisoned(0, 3, 4, 39), rows=40, window=8)
    crashed = [row for row, (_, code) in ends(finished).items() if code is ErrorCode.ENGINE_CRASH]
    assert sorted(crashed) == [0, 3, 4, 39]


async def test_a_death_without_a_guilty_row_costs_no_row() -> None:
    def die_once(body: bytes, before: int) -> Reply:
        if body == b"11" and before == 0:
            raise EngineDownError("out of luck")
        return OK

    engine = Engine(die_once)
    finished, _ = await run(engine, rows=30, window=9)
    assert ends(finished) == dict.fromkeys(range(30), (Outcome.SUCCEEDED, None))
    assert engine.restarts == 1


async def test_suspects_run_in_waves_of_about_the_root_of_their_number() -> None:
    together: list[int] = []

    def die_once(body: bytes, before: int) -> Reply:
        if body == b"0" and before == 0:
            raise EngineDownError("dead")
        if engine.restarts:
            together.append(engine.inside)
        return OK

    engine = Engine(die_once)
    await run(engine, rows=16, window=16)
    assert max(together) == 4


async def test_an_engine_that_never_answers_is_given_up_after_its_budget() -> None:
    def die(body: bytes, before: int) -> Reply:
        raise EngineDownError("dead at once")

    engine = Engine(die)
    finished: list[Finished] = []
    with pytest.raises(EngineDownError, match="died 3 times without answering a row in between"):
        await Scheduler(engine, finished.append, 8, restart=RestartPolicy(restarts=2)).run(Feed(20))
    assert engine.restarts == 2
    # No row is blamed for an engine that answers nobody.
    assert finished == []


async def test_an_engine_that_shows_no_progress_counts_as_dead_and_its_rows_run_again() -> None:
    gate = asyncio.Event()
    engine = Engine(lambda *_: OK, gate)
    now = 0.0

    async def tick(seconds: float) -> None:
        nonlocal now
        now += seconds
        if engine.restarts:
            gate.set()
        await asyncio.sleep(0)

    finished: list[Finished] = []
    scheduler = Scheduler(
        engine,
        finished.append,
        4,
        restart=RestartPolicy(stall_seconds=60.0, look_every_seconds=5.0),
        sleep=tick,
        clock=lambda: now,
    )
    restart = engine.restart

    async def restart_and_open() -> None:
        await restart()
        gate.set()

    engine.restart = restart_and_open  # type: ignore[method-assign]
    await scheduler.run(Feed(12))
    assert engine.restarts == 1
    assert ends(finished) == dict.fromkeys(range(12), (Outcome.SUCCEEDED, None))


async def test_an_engine_that_still_writes_tokens_is_left_alone() -> None:
    gate = asyncio.Event()
    engine = Engine(lambda *_: OK, gate)
    now = 0.0

    async def tick(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert engine.mark is not None
        engine.mark += 1
        if now > 1000:
            gate.set()
        await asyncio.sleep(0)

    finished: list[Finished] = []
    await Scheduler(
        engine, finished.append, 4, restart=RestartPolicy(stall_seconds=60.0), sleep=tick, clock=lambda: now
    ).run(Feed(4))
    assert (engine.restarts, len(finished)) == (0, 4)


@given(
    rows=st.integers(1, 30),
    window=st.integers(1, 12),
    poison=st.sets(st.integers(0, 29), max_size=3),
    deaths=st.sets(st.tuples(st.integers(0, 29), st.integers(0, 2)), max_size=6),
)
async def test_whatever_dies_when_every_row_ends_exactly_once(
    rows: int, window: int, poison: set[int], deaths: set[tuple[int, int]]
) -> None:
    def script(body: bytes, before: int) -> Reply:
        if int(body) in poison or (int(body), before) in deaths:
            raise EngineDownError("dead")
        return OK

    finished: list[Finished] = []
    await Scheduler(Engine(script), finished.append, window, restart=RestartPolicy(restarts=50)).run(Feed(rows))
    found = ends(finished)
    assert set(found) == set(range(rows))
    crashed = {row for row, (_, code) in found.items() if code is ErrorCode.ENGINE_CRASH}
    assert poison & set(range(rows)) <= crashed
    # Others only where the dice killed the engine on them again and again.
    assert crashed - poison <= {row for row, _ in deaths}
