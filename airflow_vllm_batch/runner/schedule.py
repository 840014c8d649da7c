"""Keep a bounded window of rows in the engine, and find the row that kills it. Knows no storage and no vLLM."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from airflow_vllm_batch.contract import ErrorCode, Outcome
from airflow_vllm_batch.runner.engine.base import ConnectionLostError, Engine, Reply
from airflow_vllm_batch.runner.errors import EngineDownError
from airflow_vllm_batch.runner.results import Finished, Job, refusal_of, retryable

log = logging.getLogger(__name__)

DEATHS_ALONE = 2
"""A row that takes the engine with it so often while nothing else runs is the cause."""


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


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine is given up.

    :param restarts: restarts in a row after which not one row was answered.
    :param stall_seconds: an engine with rows in it that shows no progress for so long counts as dead; null: never.
    :param look_every_seconds: how often that is looked at.
    """

    restarts: int = 5
    stall_seconds: float | None = None
    look_every_seconds: float = 5.0


@dataclass
class _Flight:
    """A row on its way, over all its sends."""

    job: Job
    attempts: int = 0
    deaths_alone: int = 0


Sleep = Callable[[float], Awaitable[None]]
Collect = Callable[[Finished], None]


@dataclass
class Scheduler:
    """Sends every job and hands each end to ``collect``.

    ``window`` jobs run at once, the next is taken when one ends, so memory does not grow with the input. A job that
    waits for its retry keeps its place: a server that is overrun gets fewer rows, not others.

    When the engine dies, the jobs in it are suspects. It is restarted, and they run again in waves of about √n with
    nothing else beside them; the rows of a wave in which it dies again run one by one; a row with which it dies twice
    alone ends as ``engine_crash``, once the engine has answered another one: a broken engine is no row's fault. Then
    the window goes on.
    """

    engine: Engine
    collect: Collect
    window: int
    retry: RetryPolicy = RetryPolicy()
    restart: RestartPolicy = RestartPolicy()
    on_in_flight: Callable[[int], None] = lambda count: None
    on_restart: Callable[[str], None] = lambda reason: None
    sleep: Sleep = asyncio.sleep
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    _in_flight: dict[int, _Flight] = field(default_factory=dict)
    _answered: int = 0
    _fruitless_restarts: int = 0
    _condemned: list[_Flight] = field(default_factory=list)

    async def run(self, jobs: Iterator[Job]) -> None:
        """Return when every job has ended.

        Cancelling aborts what is in flight; those jobs get no end and are not collected.

        :raises EngineDownError: where the engine died more often in a row than the policy allows.
        :raises EngineStartError: where it can't be started again.
        :raises ServerRefusesError: from the engine.
        """
        flights = (_Flight(job) for job in jobs)
        while suspects := await self._fly(flights, self.window):
            await self._clear(suspects)
        self._convict()

    async def _clear(self, suspects: list[_Flight]) -> None:
        """Run suspects until each has an end of its own."""
        await self._start_again(f"{len(suspects)} rows were in flight")
        size = math.isqrt(len(suspects) - 1) + 1 if suspects else 1
        log.info("%d suspects run again in waves of %d", len(suspects), size)
        for start in range(0, len(suspects), size):
            wave = suspects[start : start + size]
            flights = iter(wave)
            for flight in await self._fly(flights, size):
                if len(wave) == 1:
                    flight.deaths_alone += 1
                await self._clear_alone(flight)
            for flight in flights:
                # The engine died before this one was sent.
                await self._clear_alone(flight)

    async def _clear_alone(self, flight: _Flight) -> None:
        while True:
            await self._start_again(f"the suspect {flight.job.custom_id!r} was in flight")
            if flight.deaths_alone >= DEATHS_ALONE:
                self._condemned.append(flight)
                return
            if not await self._fly(iter([flight]), 1):
                return
            flight.deaths_alone += 1

    async def _start_again(self, circumstance: str) -> None:
        """Restart the engine unless it is well."""
        if not self.engine.down:
            return
        if self._fruitless_restarts >= self.restart.restarts:
            raise EngineDownError(
                f"the engine died {self._fruitless_restarts + 1} times without answering a row in between"
            )
        self._fruitless_restarts += 1
        self.on_restart(circumstance)
        await self.engine.restart()

    async def _fly(self, flights: Iterable[_Flight], window: int) -> list[_Flight]:
        """Run flights through a window; returns those that were in the engine when it died, none where it lived."""
        down = asyncio.Event()
        source = iter(flights)

        async def work() -> None:
            for flight in source:
                self._in_flight[flight.job.row] = flight
                self.on_in_flight(len(self._in_flight))
                try:
                    await self._finish(flight)
                except EngineDownError as error:
                    log.warning("%s", error)
                    down.set()
                    return
                del self._in_flight[flight.job.row]
                self.on_in_flight(len(self._in_flight))
                if down.is_set():
                    return

        workers = [asyncio.ensure_future(work()) for _ in range(window)]
        watch = asyncio.ensure_future(self._watch(down))
        died = asyncio.ensure_future(down.wait())
        everything: set[asyncio.Future[Any]] = {*workers, watch, died}
        try:
            pending: set[asyncio.Future[Any]] = set(workers)
            while pending and not down.is_set():
                done, _ = await asyncio.wait({*pending, died}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what is no row's failure
                pending -= done
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            suspects = list(self._in_flight.values())
            self._in_flight.clear()
            self.on_in_flight(0)
        return suspects if down.is_set() else []

    async def _watch(self, down: asyncio.Event) -> None:
        """Call an engine dead that has rows and shows no progress for too long."""
        stall = self.restart.stall_seconds
        if stall is None:
            return
        seen: tuple[int | None, int] | None = None
        since = self.clock()
        while True:
            await self.sleep(self.restart.look_every_seconds)
            now = (self.engine.progress_mark(), self._answered)
            if now != seen or now[0] is None or not self._in_flight:
                seen, since = now, self.clock()
            elif self.clock() - since >= stall:
                log.warning("the engine shows no progress for %.0f s: it counts as dead", self.clock() - since)
                self.engine.give_up("no progress")
                down.set()
                return

    async def _finish(self, flight: _Flight) -> None:
        """Send a row until it has an end, and collect it."""
        job, policy = flight.job, self.retry
        if refusal := self.engine.check(job.endpoint, job.body):
            self._end(flight, Outcome.INVALID, refusal.code, refusal.message, None, None)
            return
        while True:
            flight.attempts += 1
            reply: Reply | None = None
            started = self.clock()
            try:
                async with asyncio.timeout(policy.row_timeout_seconds):
                    reply = await self.engine.send(job.endpoint, job.body)
            except TimeoutError:
                code, message = ErrorCode.TIMEOUT, f"no answer within {policy.row_timeout_seconds:g} s"
            except ConnectionLostError as error:
                code, message = ErrorCode.CONNECTION_LOST, str(error)
            else:
                seconds = self.clock() - started
                if 200 <= reply.status < 300:
                    self._end(flight, Outcome.SUCCEEDED, None, None, reply, seconds)
                    return
                code, message = refusal_of(reply)
                if not retryable(reply.status):
                    self._end(flight, Outcome.FAILED, code, message, reply, seconds)
                    return
            if flight.attempts > policy.retries:
                times = f" (sent {flight.attempts} times)" if flight.attempts > 1 else ""
                self._end(flight, Outcome.FAILED, code, message + times, reply, self.clock() - started)
                return
            await self.sleep(policy.delay(flight.attempts, reply.retry_after_seconds if reply else None, self.jitter()))

    def _end(
        self,
        flight: _Flight,
        outcome: Outcome,
        code: ErrorCode | None,
        message: str | None,
        reply: Reply | None,
        seconds: float | None,
    ) -> None:
        if reply is not None:
            self._answered += 1
            self._fruitless_restarts = 0
            self._convict()
        self.collect(Finished(flight.job, outcome, flight.attempts, code, message, reply, seconds))

    def _convict(self) -> None:
        """End the rows that killed an engine which otherwise works."""
        condemned, self._condemned = self._condemned, []
        for flight in condemned:
            message = f"the engine died {flight.deaths_alone} times while this row alone was in it"
            self._end(flight, Outcome.FAILED, ErrorCode.ENGINE_CRASH, message, None, None)
