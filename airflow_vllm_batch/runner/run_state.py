"""What is true of the run right now: written by the run, read by the heartbeat thread. Plain numbers, no I/O."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from airflow_vllm_batch.contract import Outcome, Phase, Progress, Usage
from airflow_vllm_batch.contract.manifest import TimelinePoint
from airflow_vllm_batch.runner.error_groups import ErrorGroups

RATE_WINDOW_SECONDS = 60.0
TIMELINE_POINTS = 120


def utc_now() -> datetime:
    return datetime.now(UTC)


class Sample(NamedTuple):
    """A moment of the run, for rates."""

    at: float
    """Monotonic seconds."""
    rows_answered: int
    tokens: int


@dataclass
class RunState:
    """Counters and phase of one try.

    Every field is set by assignment of a new value, which is atomic for a reader in another thread; a reader may see
    two counters of different moments, which is good enough for progress and never used for the manifest.
    """

    run_key: str
    generation: int
    attempt: int
    shard: int | None = None
    node: str | None = None
    now: Callable[[], datetime] = utc_now
    clock: Callable[[], float] = time.monotonic

    phase: Phase = Phase.STAGING
    phase_since: datetime = field(init=False)
    started_at: datetime = field(init=False)
    last_event: str | None = None
    last_event_at: datetime | None = None
    rows: int | None = None
    rows_reused: int = 0
    rows_durable: int = 0
    rows_in_flight: int = 0
    rows_answered: int = 0
    """Rows that ended in this try because the engine was asked."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    engine_restarts: int = 0
    by_outcome: Counter[Outcome] = field(default_factory=Counter)
    error_groups: ErrorGroups = field(default_factory=ErrorGroups)
    _samples: deque[Sample] = field(default_factory=deque)
    _timeline: list[TimelinePoint] = field(default_factory=list)
    _timeline_every: float = 1.0
    _started_clock: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.phase_since = self.now()
        self._started_clock = self.clock()

    @property
    def rows_done(self) -> int:
        return sum(self.by_outcome.values())

    @property
    def seconds(self) -> float:
        """Since the try started."""
        return self.clock() - self._started_clock

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase, self.phase_since = phase, self.now()

    def set_in_flight(self, rows: int) -> None:
        self.rows_in_flight = rows

    def note(self, event: str) -> None:
        """Say in a few words what happened last."""
        self.last_event, self.last_event_at = event, self.now()

    def sample(self) -> None:
        """Take a sample for the rates; the heartbeat calls it at each beat."""
        now = self.clock()
        tokens = self.prompt_tokens + self.completion_tokens
        self._samples.append(Sample(now, self.rows_answered, tokens))
        while len(self._samples) > 2 and now - self._samples[0].at > RATE_WINDOW_SECONDS:
            self._samples.popleft()
        self._extend_timeline()

    def rates(self) -> tuple[float | None, float | None]:
        """Return rows and tokens per second over the last minute; null while nothing was answered."""
        if len(self._samples) < 2 or self.phase is not Phase.RUNNING:
            return None, None
        first, last = self._samples[0], self._samples[-1]
        if last.at <= first.at or last.rows_answered == first.rows_answered:
            return None, None
        seconds = last.at - first.at
        return (last.rows_answered - first.rows_answered) / seconds, (last.tokens - first.tokens) / seconds

    def timeline(self) -> list[TimelinePoint]:
        """Return at most 120 points, evenly spaced over the try."""
        return list(self._timeline)

    def progress(self) -> Progress:
        """Return the document for storage."""
        rows_per_second, tokens_per_second = self.rates()
        left = None if self.rows is None else max(0, self.rows - self.rows_done)
        return Progress(
            run_key=self.run_key,
            generation=self.generation,
            attempt=self.attempt,
            shard=self.shard,
            phase=self.phase,
            phase_since=self.phase_since,
            started_at=self.started_at,
            updated_at=self.now(),
            last_event=self.last_event,
            last_event_at=self.last_event_at,
            rows=self.rows,
            rows_done=self.rows_done,
            rows_reused=self.rows_reused,
            rows_durable=self.rows_durable,
            rows_in_flight=self.rows_in_flight,
            by_outcome=dict(self.by_outcome),
            rows_per_second=rows_per_second,
            tokens_per_second=tokens_per_second,
            seconds_left=left / rows_per_second if left is not None and rows_per_second else None,
            usage=Usage(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.completion_tokens,
                total_tokens=self.prompt_tokens + self.completion_tokens,
            ),
            error_groups=self.error_groups.top(5),
            engine_restarts=self.engine_restarts,
            node=self.node,
        )

    def _extend_timeline(self) -> None:
        seconds = self.seconds
        if self._timeline and seconds - self._timeline[-1].seconds < self._timeline_every:
            return
        rows_per_second, tokens_per_second = self.rates()
        self._timeline.append(
            TimelinePoint(
                seconds=round(seconds, 3),
                rows_done=self.rows_done,
                rows_in_flight=self.rows_in_flight,
                rows_per_second=rows_per_second,
                tokens_per_second=tokens_per_second,
            )
        )
        if len(self._timeline) >= TIMELINE_POINTS:
            # Half the points at twice the distance: a run of any length keeps its whole course.
            self._timeline = self._timeline[::2]
            self._timeline_every *= 2
