"""``vllm-batch results``: rows of a finished run, or the requests behind them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator

from airflow_vllm_batch.batchfile.join import MismatchError, join, split_lines
from airflow_vllm_batch.cli.folder import open_run_folder
from airflow_vllm_batch.contract import ExitCode, Manifest
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.compression import CorruptStreamError, decompress
from airflow_vllm_batch.storage.run_folder import RunFolder


class _NotDoneError(Exception):
    """There are no results to print."""


def results(arguments: argparse.Namespace) -> int:
    """Print rows in input order; returns 0, or 69 where they can't be read."""
    folder = open_run_folder(arguments)
    rows = _requests(folder, failed_only=arguments.failed) if arguments.requests else _rows(folder, arguments.failed)
    try:
        asyncio.run(_print(rows))
    except (StorageError, FileNotFoundError, MismatchError, CorruptStreamError, _NotDoneError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.STORAGE
    return ExitCode.PASSED


async def _print(rows: AsyncIterator[bytes]) -> None:
    write = sys.stdout.buffer.write
    async for row in rows:
        write(row + b"\n")
    sys.stdout.buffer.flush()


async def _manifest(folder: RunFolder) -> Manifest:
    owner = await folder.read_owner()
    if owner is not None:
        folder.at_generation(owner.generation)
    manifest = await folder.read_done_manifest() if owner is not None else None
    if manifest is None:
        raise _NotDoneError(f"no finished run in {folder.output.state_uri}; vllm-batch status tells more")
    return manifest


def _stream(folder: RunFolder, manifest: Manifest, *roles: str) -> AsyncIterator[bytes]:
    """Read the files of some roles one after the other."""

    async def read() -> AsyncIterator[bytes]:
        for output in manifest.outputs:
            if output.role in roles:
                source = folder.access.open_source(output.uri, folder.output.store)
                async for chunk in source.stream(etag=output.etag):
                    yield chunk

    return read()


async def _rows(folder: RunFolder, failed_only: bool) -> AsyncIterator[bytes]:  # noqa: FBT001  private
    manifest = await _manifest(folder)
    wanted = ("errors", "all") if failed_only else ("output", "all", "errors")
    for role in wanted:
        async for line in split_lines(_stream(folder, manifest, role)):
            if line.raw is not None and not (failed_only and role == "all" and line.raw.endswith(b',"error":null}')):
                yield line.raw


async def _requests(folder: RunFolder, *, failed_only: bool) -> AsyncIterator[bytes]:
    manifest = await _manifest(folder)
    spec = await folder.read_spec()
    if spec is None:
        raise _NotDoneError(f"{folder.store.uri(folder.layout.spec)} is gone: nobody knows what the input was")
    requests = _inputs(folder, spec_inputs=[(source.uri, source.store, source.etag) for source in spec.inputs])
    async for row in join(requests, _stream(folder, manifest, "output", "all"), _stream(folder, manifest, "errors")):
        if not (failed_only and row.succeeded):
            yield row.request


async def _inputs(folder: RunFolder, *, spec_inputs: list[tuple[str, str, str | None]]) -> AsyncIterator[bytes]:
    for uri, store, etag in spec_inputs:
        source = folder.access.open_source(uri, store)
        async for chunk in decompress(source.stream(etag=etag), uri):
            yield chunk
        yield b"\n"  # an input whose last line has no end must not run into the next one
