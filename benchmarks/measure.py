"""Run a command and say what it took: seconds, CPU seconds and peak memory of its own process, children left out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_EVERY_SECONDS = 0.02


class Taken(NamedTuple):
    seconds: float
    cpu_seconds: float
    """User and system time of the process itself."""
    peak_bytes: int
    """Largest resident set of the process itself."""


def run(command: Sequence[str], folder: Path) -> Taken:
    """Run a Python module with arguments to its end; raises where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with (folder / "command.log").open("wb") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        cpu, peak = 0.0, 0
        while process.poll() is None:
            # What the kernel says of a process is gone with it, so the last look before its end counts.
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / _TICKS
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
            except (OSError, IndexError):
                break
            time.sleep(_LOOK_EVERY_SECONDS)
        code = process.wait()
        seconds = time.monotonic() - started
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{(folder / 'command.log').read_text()[-3000:]}")
    return Taken(seconds, cpu, peak)


def table(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print measure, figure and goal."""
    print(f"\n{title}")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
