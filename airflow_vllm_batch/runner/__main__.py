"""Spec in, exit code out: how an operator, a pod or a person starts the runner. The only place that exits."""

from __future__ import annotations

import sys

from airflow_vllm_batch.runner.signals import StopSignal, install, stop_at_end_of_stdin

STOP = StopSignal()


def main(argv: list[str]) -> int:
    """Run ``--spec URI [--store FILE] [--stop-on-eof]`` and return the exit code."""
    # Before anything heavy is imported: a SIGTERM in the first second is heard as well.
    install(STOP)

    import argparse
    import asyncio
    from pathlib import Path

    from airflow_vllm_batch.contract import BatchSpec, ExitCode
    from airflow_vllm_batch.runner.process import run_spec
    from airflow_vllm_batch.storage.access import Access
    from airflow_vllm_batch.storage.base import StorageError
    from airflow_vllm_batch.storage.settings import StoreSettingsError

    parser = argparse.ArgumentParser(prog="python -m airflow_vllm_batch.runner", description=__doc__)
    parser.add_argument("--spec", required=True, metavar="URI", help="the spec.json of a run folder")
    parser.add_argument("--store", metavar="FILE", help="store settings; read again when the file changes")
    parser.add_argument("--stop-on-eof", action="store_true", help="take the end of standard input for a SIGTERM")

    def refuse(message: str) -> None:
        sys.stderr.write(f"{parser.format_usage()}error: {message}\n")
        sys.exit(ExitCode.USAGE)

    parser.error = refuse  # type: ignore[assignment,method-assign]
    arguments = parser.parse_args(argv)
    if arguments.stop_on_eof:
        stop_at_end_of_stdin(STOP)

    async def read(access: Access) -> BatchSpec:
        source = access.open_source(arguments.spec, "output")
        raw = b"".join([chunk async for chunk in source.stream()])
        return BatchSpec.read(raw, source.uri)

    try:
        access = Access.from_file(Path(arguments.store)) if arguments.store else Access.ambient()
        spec = asyncio.run(read(access))
    except (FileNotFoundError, StorageError) as error:
        sys.stderr.write(f"error: the spec can't be read: {error}\n")
        return ExitCode.STORAGE
    except (StoreSettingsError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.USAGE
    return run_spec(spec, access, STOP, started_by="runner").exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
