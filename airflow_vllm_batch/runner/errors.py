"""What can end a run before its manifest, by who must act. Each maps to one exit code."""

from __future__ import annotations

from airflow_vllm_batch.contract import ExitCode


class RunError(Exception):
    """Ends the run; the message is for people."""

    exit_code = ExitCode.BUG


class EngineDownError(RunError):
    """The engine died or hangs; rows in flight have no result."""

    exit_code = ExitCode.RESUMABLE


class EngineStartError(RunError):
    """The engine can't start.

    :param passing: whether the cause may be gone at another try (memory held by others, a driver, a server away).
    """

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.RESUMABLE if passing else ExitCode.ENGINE_CONFIG


class ServerRefusesError(RunError):
    """The server refuses us as a whole (401, 403, unknown model): every other row would end the same way."""

    exit_code = ExitCode.ENGINE_CONFIG


class SpecError(RunError):
    """The spec or the command line asks for something that can't be done."""

    exit_code = ExitCode.USAGE


class StoppedError(RunError):
    """Asked to stop; what was finished is in storage."""

    exit_code = ExitCode.RESUMABLE


class LocalDiskError(RunError):
    """The local disk is full or failed."""

    exit_code = ExitCode.LOCAL_DISK
