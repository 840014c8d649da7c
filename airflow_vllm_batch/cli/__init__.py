"""vllm-batch: a thin shell over batchfile, storage and runner. Knows no Airflow and imports no engine by itself."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from airflow_vllm_batch import __version__
from airflow_vllm_batch.cli.errors import UsageError
from airflow_vllm_batch.contract.exit_codes import ExitCode
from airflow_vllm_batch.contract.spec import check_threshold

ENGINE_HELP = (
    "Every other flag goes to vLLM as it is: see "
    "https://docs.vllm.ai/en/stable/configuration/engine_args.html, or "
    "'python -m vllm.entrypoints.openai.api_server --help' where vLLM is installed."
)


class _Parser(argparse.ArgumentParser):
    """Ends with our exit code for bad arguments instead of argparse's 2, which means something else here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "run":
        parser.error(f"unknown argument {rest[0]!r}")
    try:
        return int(arguments.handler(arguments, rest))
    except UsageError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # The reader of our output left, such as head: nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.PASSED


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="vllm-batch",
        description="Run OpenAI batch files on vLLM: resumable, row by row, with every row accounted for.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_validate(commands)
    _add_status(commands)
    _add_results(commands)
    _add_verify(commands)
    _add_cancel(commands)
    return parser


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.run import run

    return run(arguments, rest)


def _validate(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.validate import validate

    return validate(arguments)


def _status(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.status import status

    return status(arguments)


def _results(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.results import results

    return results(arguments)


def _verify(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.verify import verify

    return verify(arguments)


def _cancel(arguments: argparse.Namespace, rest: list[str]) -> int:
    from airflow_vllm_batch.cli.cancel import cancel

    return cancel(arguments)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a batch file; the same command again resumes",
        description="Run a batch file. The same command again resumes: only rows without a result run.",
        epilog=ENGINE_HELP,
        allow_abbrev=False,
    )
    run.add_argument("-i", "--input", required=True, metavar="URI", help="path, s3://, gs://, abfs:// or http(s)://")
    run.add_argument(
        "-o", "--output", required=True, metavar="URI", help="a folder, or one object (.jsonl, http(s) PUT)"
    )
    run.add_argument("--model", metavar="M", help="hub name or path; with --server-url the name that the server serves")
    run.add_argument("--server-url", metavar="URL", help="use a running OpenAI-compatible server instead of vLLM here")
    run.add_argument("--engine", choices=("vllm", "echo"), default="vllm", help="echo answers without a model")
    run.add_argument("--delay-seconds", type=float, default=0.0, metavar="S", help="echo: how long an answer takes")
    run.add_argument("--store", metavar="FILE", help="store settings (JSON); read again when the file changes")
    run.add_argument("--state", metavar="URI", help="folder for manifest and state of a one-file output")
    rows = run.add_argument_group("rows")
    rows.add_argument("--bad-lines", choices=("isolate", "strict"), default="isolate")
    rows.add_argument("--unknown-parameters", choices=("error", "warn", "allow"), default="error")
    rows.add_argument("--allow-parameter", action="append", default=[], metavar="NAME", help="may be given repeatedly")
    rows.add_argument(
        "--allowed-failures", type=_threshold, default=0, metavar="X", help="a count (3) or a share (0.01); default 0"
    )
    rows.add_argument(
        "--bad-answers",
        choices=("count", "fail"),
        default="count",
        help="fail: an answer that is empty, or not the JSON that its row asked for, counts as a failure",
    )
    rows.add_argument("--row-retries", type=int, default=3, metavar="N")
    rows.add_argument("--row-timeout", type=float, metavar="S", help="seconds for one answer")
    rows.add_argument("--max-in-flight", type=int, metavar="N", help="default: from the engine's max_num_seqs")
    rows.add_argument(
        "--order", choices=("prefix", "input"), default="prefix", help="prefix: rows that begin alike run together"
    )
    rows.add_argument("--limit", type=int, metavar="N", help="only the first N rows, for a trial")
    tries = run.add_argument_group("tries")
    tries.add_argument("--checkpoint-seconds", type=float, default=10.0, metavar="S")
    tries.add_argument(
        "--completion-window", type=float, metavar="S", help="seconds; rows without a result then become expired"
    )
    tries.add_argument("--overwrite", action="store_true", help="take over the folder of another run")
    tries.add_argument("--restart", action="store_true", help="run every row anew")
    run.set_defaults(handler=_run)


def _add_validate(commands: Any) -> None:
    validate = commands.add_parser("validate", help="check a batch file without an engine", allow_abbrev=False)
    validate.add_argument("input", metavar="INPUT", help="path or URI")
    validate.add_argument("--model", action="append", metavar="M", help="a served name; may be given repeatedly")
    validate.add_argument("--task", choices=("generate", "embed", "score"), help="what the model can do")
    validate.add_argument("--bad-lines", choices=("isolate", "strict"), default="isolate")
    validate.add_argument("--unknown-parameters", choices=("error", "warn", "allow"), default="error")
    validate.add_argument("--allow-parameter", action="append", default=[], metavar="NAME")
    validate.add_argument("--json", action="store_true", help="one JSON object on standard output")
    validate.add_argument("--store", metavar="FILE", help="store settings (JSON)")
    validate.set_defaults(handler=_validate)


def _add_folder_command(commands: Any, name: str, *, help_text: str) -> argparse.ArgumentParser:
    """Add a command that looks at a run's folder; see ``cli.folder`` for what its arguments name."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, allow_abbrev=False)
    command.add_argument("output", metavar="OUTPUT", help="the run's output")
    command.add_argument("--state", metavar="URI", help="folder of the state, for a one-file output")
    command.add_argument("--store", metavar="FILE", help="store settings (JSON)")
    return command


def _add_status(commands: Any) -> None:
    status = _add_folder_command(commands, "status", help_text="say how a run is doing, or how it ended")
    status.add_argument("--json", action="store_true", help="one JSON object on standard output")
    status.set_defaults(handler=_status)


def _add_results(commands: Any) -> None:
    results = _add_folder_command(commands, "results", help_text="print rows of a finished run, or their requests")
    results.add_argument("--failed", action="store_true", help="only rows that did not succeed")
    results.add_argument("--requests", action="store_true", help="the request lines instead, ready to run")
    results.set_defaults(handler=_results)


def _add_verify(commands: Any) -> None:
    verify = _add_folder_command(
        commands, "verify", help_text="read and hash the outputs of a finished run against its manifest"
    )
    verify.set_defaults(handler=_verify)


def _add_cancel(commands: Any) -> None:
    cancel = _add_folder_command(
        commands, "cancel", help_text="end the try that runs; rows without a result become cancelled"
    )
    cancel.add_argument("--reason", metavar="TEXT", help="stands in the error of each cancelled row")
    cancel.set_defaults(handler=_cancel)


def _threshold(text: str) -> int | float:
    """Read a number of rows (``3``) or a share of them (``0.03``); 1 is one row, 1.0 every row."""
    try:
        return check_threshold("--allowed-failures", int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
