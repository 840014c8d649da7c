"""The command line and the runner as processes of their own, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without what would let a test depend on the machine it runs on."""
    dropped = {"OPENAI_API_KEY", "VLLM_BATCH_API_KEY"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **(extra or {})}


def vllm_batch(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, seconds: float = 110
) -> Done:
    """Run ``vllm-batch`` to its end, which must come within ``seconds``."""
    done = subprocess.run(
        [sys.executable, "-m", "airflow_vllm_batch.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env={**environment(env), "PYTHONPATH": str(ROOT)},
        timeout=seconds,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def start(
    *command: str | Path, stdin: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a module of ours as the leader of a session of its own; its output is one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**environment(env), "PYTHONPATH": str(ROOT)},
    )
