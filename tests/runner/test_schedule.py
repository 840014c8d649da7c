"""The bounded window and the row retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from airflow_vllm_batch.contract import ErrorCode, Outcome
from airflow_vllm_batch.runner.engine.base import ConnectionLostError, EngineInfo, EngineStats, Refusal, Reply
from airflow_vllm_batch.runner.errors import EngineDownError, ServerRefusesError
from airflow_vllm_batch.runner.results import Finished, Job
from airflow_vllm_batch.runner.schedule import RetryPolicy, schedule

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

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        return self.refusal

    async def send(self, endpoint: str, body: bytes) -> Reply:
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
            return self.script(body, before)
        finally:
            self.inside -= 1

    def stats(self) -> EngineStats:
        return EngineStats()

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
    await schedule(
        Feed(rows),
        engine,
        finished.append,
        window=window,
        policy=RetryPolicy(**policy),
        sleep=pauses,
        jitter=lambda: 1.0,
    )
    return finished, pauses.seconds


async def test_the_input_is_never_read_further_than_the_engine_can_take() -> None:
    feed, gate = Feed(100), asyncio.Event()
    engine = Engine(lambda *_: OK, gate)
    engine.window = 4
    finished: list[Finished] = []
    running = asyncio.create_task(schedule(feed, engine, finished.append, window=4, policy=RetryPolicy()))
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


@pytest.mark.parametrize("error", [EngineDownError("dead"), ServerRefusesError("401")])
async def test_the_end_of_the_engine_ends_the_schedule_and_no_row_is_collected_twice(error: Exception) -> None:
    def die(body: bytes, before: int) -> Reply:
        if body == b"5":
            raise error
        return OK

    finished: list[Finished] = []
    with pytest.raises(type(error), match=str(error)):
        await schedule(Feed(50), Engine(die), finished.append, window=4, policy=RetryPolicy())
    ids = [end.job.custom_id for end in finished]
    assert len(ids) == len(set(ids))
    assert "row-5" not in ids
