"""Keep a bounded window of rows in the engine. Knows nothing of storage, segments or vLLM."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from airflow_vllm_batch.contract import ErrorCode, Outcome
from airflow_vllm_batch.runner.engine.base import ConnectionLostError, Engine, Reply
from airflow_vllm_batch.runner.results import Finished, Job, refusal_of, retryable


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon a row is sent again within one try.

    :param retries: sends after the first one.
    :param row_timeout_seconds: of one send; null for no bound.
    :param first_delay_seconds: doubled with each retry, up to ``max_delay_seconds``, then drawn evenly from its upper
        half, so that rows that failed together do not come back together.
    :param max_retry_after_seconds: a server that asks for a longer pause gets this one.
    """

    retries: int = 3
    row_timeout_seconds: float | None = None
    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 30.0
    max_retry_after_seconds: float = 600.0

    def delay(self, attempts: int, retry_after_seconds: float | None, jitter: float) -> float:
        """Return the pause before the next send.

        :param attempts: sends so far, from 1.
        :param jitter: evenly drawn from 0 to 1.
        """
        backoff = min(self.first_delay_seconds * 2.0 ** (attempts - 1), self.max_delay_seconds)
        pause = backoff * (0.5 + 0.5 * jitter)
        if retry_after_seconds is None:
            return pause
        return max(pause, min(retry_after_seconds, self.max_retry_after_seconds))


Sleep = Callable[[float], Awaitable[None]]


async def schedule(
    jobs: Iterator[Job],
    engine: Engine,
    collect: Callable[[Finished], None],
    *,
    window: int,
    policy: RetryPolicy,
    in_flight: Callable[[int], None] = lambda count: None,
    sleep: Sleep = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Send every job and hand each end to ``collect``; return when all have ended.

    ``window`` jobs run at once, the next is taken from ``jobs`` when one ends, so memory does not grow with the input.
    A job that waits for its retry keeps its place: a server that is overrun gets fewer rows, not others.
    Cancelling aborts what is in flight; those jobs get no end and are not collected.

    :raises EngineDownError, ServerRefusesError: from the engine; jobs in flight are aborted, none is collected twice.
    """
    running = 0

    async def work() -> None:
        nonlocal running
        for job in jobs:
            running += 1
            in_flight(running)
            try:
                collect(await _finish(job, engine, policy, sleep, jitter))
            finally:
                running -= 1
                in_flight(running)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(window):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        # Workers fail together when the engine does: the first cause speaks for all.
        raise group.exceptions[0] from None


async def _finish(job: Job, engine: Engine, policy: RetryPolicy, sleep: Sleep, jitter: Callable[[], float]) -> Finished:
    if refusal := engine.check(job.endpoint, job.body):
        return Finished(job, Outcome.INVALID, 0, refusal.code, refusal.message, None, None)
    attempts = 0
    while True:
        attempts += 1
        reply: Reply | None = None
        started = time.monotonic()
        try:
            async with asyncio.timeout(policy.row_timeout_seconds):
                reply = await engine.send(job.endpoint, job.body)
        except TimeoutError:
            code, message = ErrorCode.TIMEOUT, f"no answer within {policy.row_timeout_seconds:g} s"
        except ConnectionLostError as error:
            code, message = ErrorCode.CONNECTION_LOST, str(error)
        else:
            seconds = time.monotonic() - started
            if 200 <= reply.status < 300:
                return Finished(job, Outcome.SUCCEEDED, attempts, None, None, reply, seconds)
            code, message = refusal_of(reply)
            if not retryable(reply.status):
                return Finished(job, Outcome.FAILED, attempts, code, message, reply, seconds)
        if attempts > policy.retries:
            if attempts > 1:
                message = f"{message} (sent {attempts} times)"
            return Finished(job, Outcome.FAILED, attempts, code, message, reply, time.monotonic() - started)
        await sleep(policy.delay(attempts, reply.retry_after_seconds if reply else None, jitter()))
