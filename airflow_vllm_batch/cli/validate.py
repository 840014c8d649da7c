"""``vllm-batch validate``: every line's verdict, without an engine and in bounded memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from airflow_vllm_batch.batchfile.reader import InputRejectedError, Tally, ascan
from airflow_vllm_batch.batchfile.rows import BadRow, Rules
from airflow_vllm_batch.cli.access import absolute, open_access
from airflow_vllm_batch.contract import ErrorCode, ExitCode
from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.compression import CorruptStreamError, decompress
from airflow_vllm_batch.storage.settings import StoreSettingsError


def validate(arguments: argparse.Namespace) -> int:
    """Check a file; returns 0, 65 where the policy refuses it, 64 or 69 where it can't be read."""
    uri = without_query(absolute(arguments.input))
    access = open_access(arguments.store, (arguments.input,))
    rules = Rules(
        served_names=frozenset(arguments.model) if arguments.model else None,
        task=arguments.task,
        unknown_parameters=arguments.unknown_parameters,
        allow_parameters=frozenset(arguments.allow_parameter),
    )
    printed = _JsonErrors() if arguments.json else None
    try:
        tally = asyncio.run(_check(access, uri, rules, printed))
    except (FileNotFoundError, StorageError) as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.STORAGE
    except (StoreSettingsError, ValueError) as error:
        sys.stderr.write(f"vllm-batch: {error}\n")
        return ExitCode.USAGE
    refused = tally.refused(strict=arguments.bad_lines == "strict")
    if printed is not None:
        printed.close(tally)
    elif tally.rejected is not None or tally.errors:
        sys.stdout.write(f"{uri}: {tally.refusal_message()}\n")
        if tally.rejected is None:
            sys.stdout.write(f"{tally.runnable:,} of {tally.requests:,} requests can run\n")
    else:
        sys.stdout.write(f"{uri}: {tally.lines:,} lines, {tally.runnable:,} requests, all can run\n")
    return ExitCode.INPUT_REFUSED if refused else ExitCode.PASSED


async def _check(access: Access, uri: str, rules: Rules, printed: _JsonErrors | None) -> Tally:
    tally = Tally()
    chunks = decompress(access.open_source(uri, "input").stream(), uri)
    try:
        async for row in ascan(chunks, rules, tally):
            if printed is not None and isinstance(row, BadRow):
                printed.add(row.line, row.custom_id, row.fault.code, row.fault.message)
    except InputRejectedError as error:
        tally.rejected = error
    except CorruptStreamError as error:
        tally.rejected = InputRejectedError(ErrorCode.UNSUPPORTED_FILE, str(error))
    if tally.rejected is not None:
        tally.runnable = 0
        if printed is not None:
            printed.add(None, None, tally.rejected.code, tally.rejected.message)
    return tally


class _JsonErrors:
    """Writes the JSON object as it goes: a million bad lines need no memory."""

    def __init__(self) -> None:
        self._write = sys.stdout.write
        self._separator = '{"errors": ['

    def add(self, line: int | None, custom_id: str | None, code: str, message: str) -> None:
        error: dict[str, Any] = {"line": line, "custom_id": custom_id, "code": str(code), "message": message}
        self._write(f"{self._separator}{json.dumps(error)}")
        self._separator = ",\n"

    def close(self, tally: Tally) -> None:
        if self._separator.startswith("{"):
            self._write(self._separator)
        self._write(f'], "lines": {tally.lines}, "runnable": {tally.runnable}}}\n')
