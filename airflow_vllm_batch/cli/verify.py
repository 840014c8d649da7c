"""``vllm-batch verify``: read every output of a finished run and hold it against its manifest."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator

from airflow_vllm_batch.cli.folder import open_run_folder
from airflow_vllm_batch.contract import ExitCode, OutputFile
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.run_folder import RunFolder


class _DifferentError(Exception):
    """An object is not what the manifest says."""


def verify(arguments: argparse.Namespace) -> int:
    """Hash the outputs; returns 0, or 69 with the object that differs, is missing or can't be read."""
    folder = open_run_folder(arguments)
    try:
        asyncio.run(_verify(folder))
    except (StorageError, FileNotFoundError, _DifferentError) as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.STORAGE
    return ExitCode.PASSED


async def _verify(folder: RunFolder) -> None:
    owner = await folder.read_owner()
    manifest = await folder.read_manifest() if owner is not None else None
    if owner is None or manifest is None or manifest.generation != owner.generation:
        raise _DifferentError(f"no finished run in {folder.output.state_uri}; vllm-batch status tells more")
    for output in manifest.outputs:
        if output.status is not None:
            # Signed for a PUT, it can't be read; its receiver said so much.
            sys.stdout.write(f"not read  {output.uri} (put by http(s), answered with status {output.status})\n")
            continue
        source = folder.access.open_source(output.uri, folder.output.store)
        await _compare(output, source.stream())
        sys.stdout.write(f"as named  {output.uri} ({output.lines:,} lines, {output.bytes:,} bytes)\n")


async def _compare(output: OutputFile, chunks: AsyncIterator[bytes]) -> None:
    digest, size, lines = hashlib.sha256(), 0, 0
    async for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        lines += chunk.count(b"\n")
    named = (output.bytes, output.lines, output.sha256)
    found = (size, lines, digest.hexdigest())
    for what, expected, actual in zip(("bytes", "lines", "sha256"), named, found, strict=True):
        if expected != actual:
            raise _DifferentError(
                f"{output.uri} is not what the manifest names: {what} {actual}, expected {expected}. The same run "
                "command again puts it anew, without starting an engine"
            )
