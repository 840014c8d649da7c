"""``vllm-batch status``: what a run folder says of itself, whether or not anything runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import Any, NamedTuple

from airflow_vllm_batch.cli.folder import open_run_folder
from airflow_vllm_batch.cli.report import summary
from airflow_vllm_batch.contract import AttemptRecord, ExitCode, Manifest, Progress, RunOwner
from airflow_vllm_batch.contract.progress_line import progress_line
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.run_folder import RunFolder

STALE_SECONDS = 60.0


class _Status(NamedTuple):
    owner: RunOwner | None
    manifest: Manifest | None
    attempt: AttemptRecord | None
    progress: Progress | None


def status(arguments: argparse.Namespace) -> int:
    """Print a run's state; returns 0, or 69 where the folder can't be read or holds no run."""
    folder = open_run_folder(arguments)
    try:
        found = asyncio.run(_read(folder))
    except StorageError as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.STORAGE
    if found.owner is None:
        sys.stderr.write(f"vllm-batch: no run in {folder.output.state_uri}\n")
        return ExitCode.STORAGE
    sys.stdout.write(_as_json(found) if arguments.json else _as_text(found))
    return ExitCode.PASSED


async def _read(folder: RunFolder) -> _Status:
    owner = await folder.read_owner()
    if owner is None:
        return _Status(None, None, None, None)
    folder.at_generation(owner.generation)
    return _Status(
        owner,
        await folder.read_done_manifest(),
        await folder.newest_attempt(),
        await folder.read_progress(),
    )


def _as_json(found: _Status) -> str:
    document: dict[str, Any] = {
        name: value.model_dump(mode="json") if value is not None else None for name, value in found._asdict().items()
    }
    return json.dumps(document) + "\n"


def _as_text(found: _Status) -> str:
    lines = [f"run      {found.owner.run_key if found.owner else ''}"]
    attempt, progress = found.attempt, found.progress
    running = attempt is not None and not attempt.ended
    if attempt is not None:
        if attempt.ended:
            code = "?" if attempt.exit_code is None else ExitCode.describe(attempt.exit_code)
            lines.append(f"attempt  {attempt.number}, ended {attempt.ended_at:%Y-%m-%d %H:%M:%S %Z}, exit {code}")
            if attempt.reason:
                lines.append(f"reason   {attempt.reason}")
        else:
            lines.append(f"attempt  {attempt.number}, started {attempt.started_at:%Y-%m-%d %H:%M:%S %Z}")
    if progress is not None and running:
        age = (datetime.now(UTC) - progress.updated_at).total_seconds()
        stale = f" (last heard of {age:,.0f} s ago: the runner may be dead)" if age > STALE_SECONDS else ""
        lines.append(f"now      {progress_line(progress, now=progress.updated_at)}{stale}")
    text = "\n".join(lines) + "\n"
    return text + (summary(found.manifest) if found.manifest is not None and not running else "")
