"""``vllm-batch run``: arguments to a spec, a claimed folder and a runner in this process."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from airflow_vllm_batch.cli.access import absolute, open_access
from airflow_vllm_batch.cli.engine_flags import adapters, engine_args, served_names
from airflow_vllm_batch.cli.errors import UsageError
from airflow_vllm_batch.cli.report import summary
from airflow_vllm_batch.contract import BatchSpec, ContractVersionError, ExitCode, Manifest
from airflow_vllm_batch.contract.judgement import judge_again
from airflow_vllm_batch.contract.layout import RunLayout, default_state_uri, is_one_file
from airflow_vllm_batch.contract.spec import (
    EngineSpec,
    InputFile,
    Limits,
    ModelSpec,
    OutputTarget,
    RowPolicy,
    without_query,
)
from airflow_vllm_batch.runner.process import run_spec
from airflow_vllm_batch.runner.signals import StopSignal, install
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectNameError, StorageError
from airflow_vllm_batch.storage.fingerprint import fingerprints_of
from airflow_vllm_batch.storage.http import signed_url_expiry
from airflow_vllm_batch.storage.model_objects import fingerprinted
from airflow_vllm_batch.storage.run_folder import FolderTakenError, RunFolder
from airflow_vllm_batch.storage.settings import StoreSettingsError
from airflow_vllm_batch.storage.uris import parse_uri, same_object


class _Ready(NamedTuple):
    """What is left to do for a command."""

    spec: BatchSpec
    done: Manifest | None
    """Of a run that is finished already."""


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run what is left of a batch; returns an exit code of the contract."""
    stop = StopSignal()
    install(stop)
    draft = _draft(arguments, engine_args(rest))
    access = open_access(arguments.store, (arguments.input, arguments.output))
    try:
        ready = asyncio.run(_prepare(draft, access, restart=arguments.restart, overwrite=arguments.overwrite))
    except (FolderTakenError, ObjectNameError, StoreSettingsError, ContractVersionError, UsageError) as error:
        return _fail(ExitCode.USAGE, str(error))
    except (StorageError, FileNotFoundError) as error:
        return _fail(ExitCode.STORAGE, str(error))
    if ready.done is not None:
        sys.stdout.write("The run is finished; nothing was started (--restart runs every row anew).\n")
        sys.stdout.write(summary(ready.done))
        return ExitCode.PASSED if ready.done.verdict.passed else ExitCode.TOO_MANY_FAILED
    end = run_spec(ready.spec, access, stop, started_by="cli")
    if end.manifest is not None:
        sys.stdout.write(summary(end.manifest))
    if end.exit_code is not ExitCode.PASSED:
        _fail(end.exit_code, end.reason)
    return end.exit_code


def _fail(code: ExitCode, reason: str) -> int:
    hint = "; run the same command again, finished rows are kept" if code is ExitCode.RESUMABLE else ""
    sys.stderr.write(f"vllm-batch: exit {ExitCode.describe(code)}: {reason}{hint}\n")
    return code


def _draft(arguments: argparse.Namespace, args: dict[str, JsonValue]) -> BatchSpec:
    """Return the spec as far as the arguments go, under a run key that may yet be another one."""
    kind = "server" if arguments.server_url else arguments.engine
    if arguments.server_url and arguments.engine == "echo":
        raise UsageError("--server-url and --engine echo exclude each other")
    if kind != "vllm" and args:
        flag = next(iter(args))
        raise UsageError(
            f"{flag if flag.startswith('-') else '--' + flag.replace('_', '-')} is not a flag of ours, "
            f"and with {'--server-url' if kind == 'server' else '--engine echo'} there is no vLLM to take it"
        )
    if not arguments.model:
        raise UsageError("--model is required" + (": the name that the server serves" if kind == "server" else ""))
    input_uri, output_uri = absolute(arguments.input), absolute(arguments.output)
    state = absolute(arguments.state) if arguments.state else default_state_uri(output_uri)
    if state is None:
        raise UsageError("an http(s) output needs --state: a folder for the manifest and the finished rows")
    if arguments.state and not is_one_file(output_uri):
        raise UsageError("--state goes with a one-file output; a folder holds its own state")
    if not is_one_file(output_uri):
        output_uri = state
    for uri in (input_uri, output_uri, state):
        try:
            parse_uri(uri)
        except ValueError as error:
            raise UsageError(str(error)) from error
    try:
        return BatchSpec(
            run_key=_new_run_key(without_query(output_uri)),
            inputs=(InputFile(uri=without_query(input_uri)),),
            output=OutputTarget(uri=without_query(output_uri), state_uri=state if state.endswith("/") else f"{state}/"),
            model=ModelSpec(name=arguments.model, served_names=served_names(args), adapters=adapters(args)),
            engine=EngineSpec(
                kind=kind, args=args, server_url=arguments.server_url, delay_seconds=arguments.delay_seconds
            ),
            policy=RowPolicy(
                bad_lines=arguments.bad_lines,
                unknown_parameters=arguments.unknown_parameters,
                allow_parameters=tuple(arguments.allow_parameter),
                allowed_failures=arguments.allowed_failures,
                bad_answers=arguments.bad_answers,
            ),
            limits=Limits(
                row_retries=arguments.row_retries,
                row_timeout_seconds=arguments.row_timeout,
                max_in_flight=arguments.max_in_flight,
                order=arguments.order,
                checkpoint_seconds=arguments.checkpoint_seconds,
                completion_window_seconds=arguments.completion_window,
                limit=arguments.limit,
            ),
            labels={"command": "vllm-batch run", "host": socket.gethostname()},
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise UsageError(f"--{'.'.join(map(str, fault['loc'])).replace('_', '-')}: {fault['msg']}") from error


def _new_run_key(output_uri: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", output_uri.rstrip("/").rpartition("/")[2].lower()).strip("-")[:40]
    return f"{slug or 'run'}-{secrets.token_hex(8)}"


async def _prepare(draft: BatchSpec, access: Access, *, restart: bool, overwrite: bool) -> _Ready:
    """Look at input and folder, claim the folder, and find out whether there is anything to do."""
    source = draft.inputs[0]
    places = [draft.output.uri] if is_one_file(draft.output.uri) else []
    places += [draft.output.state_uri + name for name in (RunLayout.output, RunLayout.errors, RunLayout.manifest)]
    if any(same_object(source.uri, place) for place in places):
        raise UsageError(f"the input {source.uri} would be overwritten by the output; choose another output")
    # Before the folder is claimed: a mistyped input leaves no trace.
    found = await access.open_source(source.uri, source.store).info()
    expiry = signed_url_expiry(access.full_url(draft.output.uri)) if is_one_file(draft.output.uri) else None
    if expiry is not None and expiry <= datetime.now(UTC):
        raise StorageError(
            f"the signed URL of {draft.output.uri} expired at {expiry:%Y-%m-%dT%H:%M:%SZ}: sign one that outlives "
            "the run"
        )
    folder = RunFolder(access, draft.output)
    owner = await folder.read_owner()
    run_key = draft.run_key
    if owner is not None:
        folder.at_generation(owner.generation)
        earlier = await folder.read_spec()
        if earlier is None or _same_run(earlier, draft):
            run_key = owner.run_key
    claim = await folder.claim(
        run_key,
        epoch=None,
        restart=restart,
        overwrite=overwrite,
        created_by=f"vllm-batch run, {getpass.getuser()} on {socket.gethostname()}",
        now=datetime.now(UTC),
    )
    spec = draft.model_copy(
        update={
            "run_key": claim.owner.run_key,
            "generation": claim.owner.generation,
            "epoch": claim.owner.epoch,
            "inputs": (source.model_copy(update={"etag": found.etag, "size": found.size}),),
        }
    )
    done = None if claim.restarted else await _finished(folder, spec, access)
    if done is None:
        await folder.write_spec(spec)
    return _Ready(spec, done)


def _same_run(earlier: BatchSpec, now: BatchSpec) -> bool:
    """Whether a command continues the run in the folder: same inputs, same model name."""
    return [source.uri for source in earlier.inputs] == [source.uri for source in now.inputs] and (
        earlier.model.name == now.model.name
    )


async def _finished(folder: RunFolder, spec: BatchSpec, access: Access) -> Manifest | None:
    """Return the manifest of a run that has nothing left to do, judged by the threshold of now."""
    manifest = await folder.read_done_manifest()
    if manifest is None or manifest.healable_rows or manifest.state != "completed":
        return None
    if manifest.spec_digest != spec.digest(*fingerprints_of(await fingerprinted(spec, access))):
        return None
    if [source.etag for source in manifest.inputs] != [source.etag for source in spec.inputs]:
        return None
    if spec.limits.limit is not None or any(source.sha256 is None for source in manifest.inputs):
        return None  # a trial over the first rows is not the run
    if manifest.verdict.overall.allowed_failures == spec.policy.allowed_failures:
        return manifest
    now = datetime.now(UTC)
    judged = manifest.model_copy(
        update={"verdict": judge_again(manifest, spec.policy, judged_at=now, judged_by="vllm-batch run")}
    )
    await folder.write_manifest(judged)
    return judged
