"""``vllm-batch cancel``: ask the try that runs to end now, with every row accounted for."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import socket
import sys
from datetime import UTC, datetime

from airflow_vllm_batch.cli.folder import open_run_folder
from airflow_vllm_batch.contract import AttemptRecord, CancelRequest, ExitCode
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.run_folder import RunFolder


class _NothingRunsError(Exception):
    """There is no try that could be cancelled."""


def cancel(arguments: argparse.Namespace) -> int:
    """Put cancel.json; returns 0, 64 where nothing runs, or 69 where that can't be told or written."""
    folder = open_run_folder(arguments)
    try:
        said = asyncio.run(_cancel(folder, arguments.reason))
    except _NothingRunsError as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.USAGE
    except (StorageError, FileNotFoundError) as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.STORAGE
    sys.stdout.write(f"{said}\n")
    return ExitCode.PASSED


async def _cancel(folder: RunFolder, reason: str | None) -> str:
    owner = await folder.read_owner()
    if owner is None:
        raise StorageError(f"no run in {folder.output.state_uri}")
    folder.at_generation(owner.generation)
    running = await _running(folder)
    now = datetime.now(UTC)
    await folder.write_cancel(
        CancelRequest(
            attempt=running.number,
            requested_at=now,
            requested_by=f"{getpass.getuser()} on {socket.gethostname()}",
            reason=reason,
        )
    )
    progress = await folder.read_progress(running.shard)
    heard = ""
    if progress is not None and progress.attempt == running.number:
        heard = f", last heard of {max(0.0, (now - progress.updated_at).total_seconds()):,.0f} s ago"
    where = f" on {running.node}" if running.node else ""
    return (
        f"Attempt {running.number}{where}{heard} is asked to end: it looks every few seconds, writes every row without "
        "a result as cancelled, and leaves with exit 3. Rows that are finished are kept; the run command again runs "
        "the others."
    )


async def _running(folder: RunFolder) -> AttemptRecord:
    """Return the try that holds the run, or the newest one that still waits for it."""
    lease = await folder.read_lease()
    holder = lease.attempt if lease is not None and lease.released_at is None else None
    numbers = await folder.attempt_numbers()
    for number in ([holder] if holder is not None else []) + numbers[::-1]:
        record = await folder.read_attempt(number)
        if record is not None and not record.ended:
            return record
    ended = f"its newest attempt, {numbers[-1]}, has ended" if numbers else "it was never started"
    raise _NothingRunsError(f"nothing runs in {folder.output.state_uri}: {ended}")
