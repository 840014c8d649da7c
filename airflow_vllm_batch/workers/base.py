"""What an operator may ask of a worker: start a runner, watch it, stop it. A worker never judges a batch.

Airflow and containers are an implementation's business; nothing here imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from airflow_vllm_batch.contract import ExitCode
from airflow_vllm_batch.storage.settings import StoreFile


class EndKind(StrEnum):
    EXITED = "exited"
    """The runner left by itself; its exit code says why."""
    KILLED = "killed"
    """A signal ended it that it could not answer: out of memory, or somebody's kill -9."""


class WorkerEnd(NamedTuple):
    """How a runner ended."""

    kind: EndKind
    exit_code: int
    """The runner's own, or the negative number of the signal that killed it."""
    reason: str
    """One sentence for people: what happened, and what to look at."""

    @property
    def meaning(self) -> ExitCode | None:
        """The exit code as one of the contract's; null for any other end."""
        try:
            return ExitCode(self.exit_code)
        except ValueError:
            return None


class Launch(NamedTuple):
    """What a runner is started with."""

    spec_uri: str
    """Of spec.json in the run folder, which the store file's entry ``output`` opens."""
    store: StoreFile
    attempt: int


class WorkerUnusableError(ValueError):
    """No runner can be started here as asked; the message says what is missing and what to do."""


class RunningWorker(Protocol):
    """A runner that was started. Its end is told once and never changes."""

    @property
    def description(self) -> str:
        """Where it runs, for people, such as ``process 4711 on gpu-3``."""
        ...

    def poll(self) -> WorkerEnd | None:
        """Return how it ended; null while it runs."""
        ...

    async def wait(self, timeout_seconds: float) -> WorkerEnd | None:
        """Return how it ended, at once when it does; null where it still runs after so long."""
        ...

    def renew(self, store: StoreFile) -> None:
        """Hand over renewed credentials."""
        ...

    def ask_to_stop(self) -> None:
        """Tell it to stop and return at once. Safe in a signal handler: takes no lock, logs nothing, asks nobody."""
        ...

    async def stop(self, *, wait_seconds: float) -> WorkerEnd:
        """Tell it to stop, wait so long, then end it and everything it started by force."""
        ...

    def close(self) -> None:
        """Remove what was kept for it on this machine. A runner that is still stopping goes on."""
        ...


class Worker(Protocol):
    """A small value: where runners run. Operators copy it, since templates are rendered in place."""

    kind: ClassVar[str]
    template_fields: ClassVar[tuple[str, ...]]
    can_defer: ClassVar[bool]
    """Whether a batch can be watched from a triggerer."""
    reads_inputs: ClassVar[bool]
    """Whether its runners read local files and http(s) URLs as this machine does; else such inputs are copied."""
    tells_progress: ClassVar[bool]
    """Whether what a runner prints reaches ``emit``: then its own lines of progress are enough for a log."""

    def copy(self) -> Self: ...

    def serialize(self) -> dict[str, Any]:
        """Return what Airflow may store and show: the same for two parses, without a secret."""
        ...

    async def check(self, engine: str) -> list[str]:
        """Find out whether such an engine could be started, before anything is; returns warnings.

        :raises WorkerUnusableError: where it can't.
        """
        ...

    async def start(self, launch: Launch, emit: Callable[[str], None]) -> RunningWorker:
        """Start a runner.

        :param emit: takes each line that it prints, from any thread.
        :raises WorkerUnusableError: where it can't be started as asked.
        :raises OSError: where this machine refuses for now.
        """
        ...
