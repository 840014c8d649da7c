"""The runner's last word where there is no manifest. Numbers follow sysexits.h where it has one that fits."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    PASSED = 0
    """The manifest is written and its verdict is a pass."""
    TOO_MANY_FAILED = 3
    """The manifest is written; more rows failed than were allowed."""
    USAGE = 64
    """Bad arguments or a bad spec; also the folder of another run, or an input that is its own output."""
    INPUT_REFUSED = 65
    """The input is empty, has no runnable line, or has a bad line under ``strict``."""
    STORAGE = 69
    """Storage can't be reached, read or written: missing object, quota, permission, credentials."""
    BUG = 70
    """A fault of ours; the run can be resumed."""
    HELD = 73
    """Another runner holds the run."""
    LOCAL_DISK = 74
    """The local disk is full or failed; the run can be resumed."""
    RESUMABLE = 75
    """Stopped before the end, or the engine could not start for a passing cause; run the same command again."""
    ENGINE_CONFIG = 78
    """The engine can't start for a cause in the spec, or the server refuses us."""

    @property
    def final(self) -> bool:
        """Whether the same try again would end the same way, so that a retry only costs time."""
        return self in {ExitCode.USAGE, ExitCode.INPUT_REFUSED, ExitCode.ENGINE_CONFIG}

    @property
    def has_manifest(self) -> bool:
        """Whether the runner wrote a manifest before it left with this code."""
        return self in {ExitCode.PASSED, ExitCode.TOO_MANY_FAILED}

    @classmethod
    def describe(cls, code: int) -> str:
        """Say in words what an exit status means; one above 128 or below 0 is a signal."""
        try:
            return f"{code} ({cls(code).name.lower().replace('_', ' ')})"
        except ValueError:
            signal_number = -code if code < 0 else code - 128
            return f"{code} (killed by signal {signal_number})" if 0 < signal_number < 65 else f"{code} (unknown)"
