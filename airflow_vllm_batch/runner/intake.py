"""Bring the inputs here and find out what each line is: one pass, to the spool and through the checks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from airflow_vllm_batch.batchfile.checks import Checker
from airflow_vllm_batch.batchfile.reader import InputRejectedError, Reading, Tally
from airflow_vllm_batch.batchfile.rows import BadRow, Row, Rules
from airflow_vllm_batch.contract import BatchSpec, ErrorCode, InputFile, Outcome
from airflow_vllm_batch.contract.manifest import InputRead
from airflow_vllm_batch.runner.answers import may_ask_for_form
from airflow_vllm_batch.runner.ordering import NO_BLOCKS, PrefixFile, block_digests, read_prompt
from airflow_vllm_batch.runner.plan import Plan
from airflow_vllm_batch.runner.results import ResultWriter
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.runner.segments import ResultFile, encode_row
from airflow_vllm_batch.storage.compression import decompress
from airflow_vllm_batch.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

FAULTS_LOGGED = 10
"""Bad lines that are logged one by one; the others are only counted."""


@dataclass
class Intake:
    """The inputs as they lie here, and what is known of every row."""

    spool: IO[bytes]
    """The inputs, decompressed, one after the other."""
    plan: Plan
    results: ResultFile
    prefixes: PrefixFile
    inputs: list[InputRead] = field(default_factory=list)
    unknown_parameters: Counter[str] = field(default_factory=Counter)
    order: array[int] = field(default_factory=lambda: array("I"))
    """Rows that passed the checks, in the order in which they run."""
    runnable: int = 0
    """Rows that passed the checks."""
    asks_for_forms: bool = False
    """Whether a row may ask for JSON."""
    seconds: float = 0.0
    cached_prompt_tokens: int | None = None
    """From the engine's counters, once rows ran."""


@contextlib.contextmanager
def open_intake(folder: Path) -> Iterator[Intake]:
    """Open the local files of a try below an empty folder."""
    path = folder / "input.jsonl"
    with contextlib.ExitStack() as files:
        spool = files.enter_context(path.open("wb", buffering=1 << 20))
        plan = files.enter_context(contextlib.closing(Plan(path)))
        results = files.enter_context(contextlib.closing(ResultFile(folder / "results.jsonl")))
        prefixes = files.enter_context(contextlib.closing(PrefixFile(folder / "prefixes")))
        yield Intake(spool, plan, results, prefixes)


async def take_in(
    intake: Intake, spec: BatchSpec, folder: RunFolder, state: RunState, *, on_runnable: Callable[[], object]
) -> None:
    """Copy every input to the spool, decompressed, and check each line on the way.

    :param on_runnable: called once, at the first row that passes the checks.
    :raises InputRejectedError: where an input is refused as a whole, or has a bad line under ``strict``.
    :raises FileNotFoundError, StorageError: from the source.
    :raises CorruptStreamError: where a compressed input is damaged.
    :raises OSError: where the local disk is full.
    """
    started = time.monotonic()
    taking = _Taking(intake, spec, state, on_runnable)
    for index, source in enumerate(spec.inputs):
        intake.inputs.append(await taking.take(folder, source, index))
    intake.seconds = time.monotonic() - started
    # Bad lines are found anew at every try, so they need no segment.
    intake.results.close_range()
    state.rows = len(intake.plan)
    # In this thread, while the engine loads in the other one.
    rows = intake.plan.left()
    intake.order = intake.prefixes.order(rows) if spec.limits.order == "prefix" else array("I", rows)
    log.info("%s", taking.describe())


class _Taking:
    """The state of one pass over all inputs."""

    def __init__(self, intake: Intake, spec: BatchSpec, state: RunState, on_runnable: Callable[[], object]) -> None:
        self.intake = intake
        self._spec = spec
        self._state = state
        self._on_runnable = on_runnable
        self._rules = Rules.of(spec)
        self._by_prefix = spec.limits.order == "prefix"
        self._writer = ResultWriter(spec.run_key, spec.generation)
        self._bad = 0
        self._tally = Tally()

    async def take(self, folder: RunFolder, source: InputFile, index: int) -> InputRead:
        """Take one input to its end."""
        stored = hashlib.sha256()
        size = 0

        async def counted(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                stored.update(chunk)
                size += len(chunk)
                yield chunk

        if source.staged is not None:
            name, chunks, etag = source.staged, folder.store.stream(source.staged), source.etag
        else:
            opened = folder.access.open_source(source.uri, source.store)
            etag = source.etag or (await opened.info()).etag
            name, chunks = source.uri, opened.stream(etag=etag)
        self.intake.plan.begin_input()
        self._tally = Tally()
        checker = Checker(self._rules)
        reading = Reading(checker, self._tally)
        base = self.intake.spool.tell()
        whole = False
        try:
            async for chunk in decompress(counted(chunks), name):
                self.intake.spool.write(chunk)
                if self._take_rows(reading, reading.feed(chunk), base, index):
                    break
                # A local file has every chunk ready: others of this loop get their turn here.
                await asyncio.sleep(0)
            else:
                self._take_rows(reading, reading.finish(), base, index)
                whole = True
        except InputRejectedError as error:
            raise InputRejectedError(error.code, f"{source.uri}: {error.message}") from error
        self.intake.spool.flush()
        self.intake.unknown_parameters.update(checker.unknown_parameters)
        if self._spec.policy.bad_lines == "strict" and self._tally.refused(strict=True):
            raise InputRejectedError(
                next(iter(self._tally.errors), ErrorCode.INVALID_REQUEST),
                f"{source.uri}: bad_lines='strict' refuses the input: {self._tally.refusal_message()}",
            )
        return InputRead(
            uri=source.uri,
            size=size if whole else None,
            etag=etag,
            sha256=stored.hexdigest() if whole else None,
            lines=self._tally.lines,
        )

    def _take_rows(self, reading: Reading, rows: Iterator[Row | BadRow], base: int, index: int) -> bool:
        """Add rows to the plan; returns whether the limit of the input is reached."""
        plan, limit = self.intake.plan, self._spec.limits.limit
        for row in rows:
            place = plan.add(row.line, base + reading.offset, reading.size)
            if isinstance(row, BadRow):
                self._refuse(row, place, index)
                self.intake.prefixes.add(NO_BLOCKS)
            else:
                if self._by_prefix:
                    prompt = read_prompt(row.url, row.body)
                    self.intake.prefixes.add(block_digests(prompt.text), prompt.most_tokens)
                self.intake.runnable += 1
                self.intake.asks_for_forms |= may_ask_for_form(row.body)
                if self.intake.runnable == 1:
                    self._on_runnable()
            if limit is not None and self._tally.requests >= limit:
                return True
        return False

    def _refuse(self, row: BadRow, place: int, index: int) -> None:
        """Give a bad line its result at once: nothing else will."""
        code, message = row.fault.code.value, row.fault.message
        self._bad += 1
        if self._bad <= FAULTS_LOGGED:
            log.warning("bad line: %s [%s]", message, code)
        elif self._bad == FAULTS_LOGGED + 1:
            log.warning("further bad lines are only counted; every one is in the errors file")
        result = self._writer.line(index, row.line, row.custom_id, None, (code, message))
        line = encode_row(
            input_index=index,
            line=row.line,
            custom_id=row.custom_id,
            digest="",
            spec_digest="",
            outcome=Outcome.INVALID,
            attempts=0,
            code=code,
            status_code=None,
            epoch=self._spec.epoch,
            result=result,
        )
        self.intake.plan.record(place, self.intake.results.append(line, hold=False))
        self._state.by_outcome[Outcome.INVALID] += 1
        self._state.error_groups.add(code, message, row.custom_id, row.line)

    def describe(self) -> str:
        rows = len(self.intake.plan)
        bad = f", {self._bad:,} bad lines" if self._bad else ""
        return f"input taken in after {self.intake.seconds:.1f} s: {rows:,} rows{bad}"
