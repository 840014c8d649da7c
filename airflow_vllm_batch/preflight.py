"""Everything that can be known before a GPU is asked for. Starts nothing and writes no row.

What is found is a ``Refusal``, with the exit code that the runner would leave with for the same cause, or a warning.
Faults of storage pass through as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from airflow_vllm_batch.arguments import Mode, Refusal
from airflow_vllm_batch.batchfile import Checker, InputRejectedError, Row, Rules, Tally, ascan
from airflow_vllm_batch.contract import BatchSpec, ExitCode, InputFile
from airflow_vllm_batch.contract.judgement import allowed_rows
from airflow_vllm_batch.input_copy import InputCopy
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import StorageError
from airflow_vllm_batch.storage.compression import CorruptStreamError, decompress
from airflow_vllm_batch.storage.http import signed_url_expiry
from airflow_vllm_batch.storage.model_objects import missing_config, open_weights, weights_in_stores
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import StoreFile
from airflow_vllm_batch.storage.uris import same_object

log = logging.getLogger(__name__)

SAMPLE_ROWS: Final = 1000
LABEL: Final = "preflight"
"""Label of a spec: how thoroughly the input that it pins was checked. A spec is written only after that."""
SIGNED_FOR_AT_LEAST: Final = timedelta(hours=1)
_SAY_EVERY_SECONDS = 30.0

_TOOLS = msgspec.json.Decoder(dict[str, Any])
_CONFIG = msgspec.json.Decoder(dict[str, Any])


def check_places(inputs: tuple[InputFile, ...], output_uri: str, state_uri: str) -> None:
    """Refuse an input that is, or lies where it would be replaced by, an output."""
    outputs = [output_uri]
    if not output_uri.startswith(("http://", "https://")):
        folder = state_uri if state_uri.endswith("/") else f"{state_uri}/"
        outputs += [f"{folder}{name}" for name in ("output.jsonl", "errors.jsonl", "manifest.json")]
    for source in inputs:
        if any(same_object(source.uri, output) for output in outputs):
            raise Refusal(
                ExitCode.USAGE,
                f"input and output are the same object: {source.uri!r} would be overwritten by the results. "
                "Choose another output_uri",
            )


# Storage


async def check_folder(folder: RunFolder) -> list[str]:
    """Write to the run folder and find out what its store enforces; returns warnings.

    :raises StorageError: where it can't be written.
    """
    try:
        conditions = await folder.store.probe()
    except StorageError as error:
        raise StorageError(f"the output folder can't be written: {error}") from error
    if conditions.create_only and conditions.if_match:
        return []
    return [
        f"the store of {folder.output.state_uri} ignores conditional writes: two runners on this folder can't be "
        "kept apart for certain. Let only one task write to it"
    ]


def check_urls(store: StoreFile, now: datetime) -> list[str]:
    """Refuse signed URLs that have ended; returns a warning for each that ends soon.

    :raises StorageError: where one has ended.
    """
    warnings = []
    for public, full in store.urls.items():
        ends = signed_url_expiry(full.get_secret_value())
        if ends is None:
            continue
        if ends <= now:
            raise StorageError(f"the signed URL of {public} ended at {ends.isoformat()}: give a fresh one")
        if ends - now < SIGNED_FOR_AT_LEAST:
            warnings.append(
                f"the signed URL of {public} ends at {ends.isoformat()}: what is not read or written by then fails, "
                "and a retry with a fresh URL goes on from there"
            )
    return warnings


async def pin_inputs(access: Access, inputs: tuple[InputFile, ...]) -> tuple[InputFile, ...]:
    """Return the inputs with the size and ETag that they have now.

    :raises StorageError: where one can't be found or read.
    """
    pinned = []
    for source in inputs:
        try:
            info = await access.open_source(source.uri, source.store).info()
        except FileNotFoundError as error:
            raise StorageError(f"the input does not exist: {source.uri!r}: {error.strerror or error}") from error
        except StorageError as error:
            raise StorageError(f"the input can't be read: {error}") from error
        if info.size == 0:
            raise Refusal(ExitCode.INPUT_REFUSED, f"input refused: {source.uri} is empty (0 bytes)")
        pinned.append(source.model_copy(update={"etag": info.etag, "size": info.size}))
    return tuple(pinned)


async def check_weights(access: Access, spec: BatchSpec) -> None:
    """Refuse a model or adapter in object storage without its configuration; a local path or hub name is not looked at.

    :raises StorageError: where that can't be told.
    """
    for weights in weights_in_stores(spec):
        store = open_weights(access, spec, weights.uri)
        for name in weights.configs:
            try:
                config = await store.get(name)
            except FileNotFoundError:
                continue
            try:
                _CONFIG.decode(config)
            except msgspec.DecodeError as error:
                raise Refusal(ExitCode.ENGINE_CONFIG, f"{store.uri(name)} is no JSON object: {error}") from error
            break
        else:
            raise Refusal(ExitCode.ENGINE_CONFIG, missing_config(weights.uri, weights.configs))


# Rows


def already_checked(before: BatchSpec | None, spec: BatchSpec, mode: Mode) -> bool:
    """Whether an earlier try checked just these bytes by just these rules, at least as thoroughly.

    The evidence is spec.json, which is written only after the check and holds the ETags that were read.
    """
    if before is None or before.labels.get(LABEL) not in ("full", mode):
        return False
    same_bytes = [(source.uri, source.etag, source.size) for source in before.inputs] == [
        (source.uri, source.etag, source.size) for source in spec.inputs
    ]
    named = all(source.etag is not None for source in spec.inputs)
    same_rules = (
        Rules.of(before) == Rules.of(spec)
        and before.policy == spec.policy
        and before.limits.limit == spec.limits.limit
        and before.engine.args == spec.engine.args
    )
    return same_bytes and named and same_rules


@dataclass
class RowsFound:
    """What a check of all inputs found."""

    requests: int = 0
    runnable: int = 0
    bad: int = 0
    need_tool_parser: int = 0
    complete: bool = True
    """False where only the first rows were looked at."""
    warnings: list[str] = field(default_factory=list)

    def describe(self) -> str:
        what = "rows" if self.complete else "rows looked at"
        return f"{self.requests:,} {what}: {self.runnable:,} can run, {self.bad:,} are bad"


async def check_rows(
    spec: BatchSpec,
    access: Access,
    mode: Mode,
    *,
    copies: Mapping[int, InputCopy] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RowsFound:
    """Check every line of every input while it streams by.

    :param copies: inputs, by their index, that are copied on the way; put once the whole input was read.
    :raises Refusal: where the policy lets nothing run: a bad line under ``strict``, no line that can run, or more bad
        lines than rows may fail.
    :raises FileNotFoundError, StorageError: from the source.
    """
    found = RowsFound()
    for index, source in enumerate(spec.inputs):
        try:
            tally = await _check_input(spec, access, source, mode, found, clock, (copies or {}).get(index))
        except InputRejectedError as error:
            raise Refusal(ExitCode.INPUT_REFUSED, f"input refused: {source.uri}: {error.message}") from error
        except CorruptStreamError as error:
            raise Refusal(ExitCode.INPUT_REFUSED, f"input refused: {source.uri}: {error}") from error
        found.requests += tally.requests
        found.runnable += tally.runnable
        found.bad += tally.errors.total()
        if spec.policy.bad_lines == "strict" and tally.refused(strict=True):
            raise Refusal(
                ExitCode.INPUT_REFUSED,
                f"bad_lines='strict' refuses {source.uri}: {tally.refusal_message()}",
            )
        if tally.errors:
            found.warnings.append(f"{source.uri}: {tally.refusal_message()}")
    _judge_rows(spec, found)
    return found


async def _check_input(
    spec: BatchSpec,
    access: Access,
    source: InputFile,
    mode: Mode,
    found: RowsFound,
    clock: Callable[[], float],
    copy: InputCopy | None,
) -> Tally:
    bounds = [bound for bound in (spec.limits.limit, SAMPLE_ROWS if mode == "sample" else None) if bound is not None]
    most = min(bounds, default=None)
    tally = Tally()
    said_at = clock()
    opened = access.open_source(source.uri, source.store)
    chunks = decompress(opened.stream(etag=source.etag), source.uri)
    if copy is not None:
        chunks = copy.tee(chunks)
    async for row in ascan(chunks, Checker(Rules.of(spec)), tally):
        if isinstance(row, Row) and _needs_tool_parser(row):
            found.need_tool_parser += 1
        if most is not None and tally.requests >= most:
            found.complete = found.complete and most == spec.limits.limit
            break
        if tally.requests % 1000 == 0 and (now := clock()) - said_at >= _SAY_EVERY_SECONDS:
            said_at = now
            log.info("checking %s: %s rows so far, %s bad", source.uri, f"{tally.requests:,}", tally.errors.total())
    if copy is not None:
        async for _ in chunks:  # a sample or a trial looks at the first rows, a copy has them all
            pass
        await copy.put()
    return tally


def _needs_tool_parser(row: Row) -> bool:
    # A cheap look first: most bodies have no such word.
    if b'"tools"' not in row.body or row.url != "/v1/chat/completions":
        return False
    body = _TOOLS.decode(row.body)
    return bool(body.get("tools")) and body.get("tool_choice") in (None, "auto")


def _judge_rows(spec: BatchSpec, found: RowsFound) -> None:
    policy = spec.policy
    listed = "\n".join(found.warnings)
    # run_anyway lets the runner write errors.jsonl and the manifest, also where not one row can run.
    if not found.runnable and found.complete and not policy.run_anyway:
        raise Refusal(ExitCode.INPUT_REFUSED, f"no line can run, so no engine was started. {listed}")
    no_parser = spec.engine.kind == "vllm" and not spec.engine.args.get("tool_call_parser")
    without_tools = found.need_tool_parser if no_parser else 0
    lost = found.bad + without_tools
    counted = found.complete or isinstance(policy.allowed_failures, int)
    allowed = allowed_rows(policy.allowed_failures, found.requests)
    if without_tools:
        found.warnings.append(
            f"{without_tools:,} rows use tools, and engine_args name no tool_call_parser: vLLM will refuse them. Set "
            "engine_args={'enable_auto_tool_choice': True, 'tool_call_parser': …}, or tool_choice 'none' in the rows"
        )
    if counted and lost > allowed and not policy.run_anyway:
        raise Refusal(
            ExitCode.INPUT_REFUSED if found.bad > allowed else ExitCode.ENGINE_CONFIG,
            f"{lost:,} of {found.requests:,} rows can't succeed, {allowed:,} may fail "
            f"(allowed_failures={policy.allowed_failures}), so no engine was started. Correct the rows, raise "
            "allowed_failures, or set run_anyway=True to run the others all the same.\n" + "\n".join(found.warnings),
        )
