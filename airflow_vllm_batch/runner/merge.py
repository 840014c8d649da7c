"""Results to the output files, in input order and bounded memory. Counts are counted from what is written here."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from airflow_vllm_batch.contract import Counts, Outcome, Usage
from airflow_vllm_batch.contract.rows import is_final
from airflow_vllm_batch.runner.answers import AnswerTally, asked_form
from airflow_vllm_batch.runner.error_groups import ErrorGroups
from airflow_vllm_batch.runner.plan import Plan
from airflow_vllm_batch.runner.results import tokens_of
from airflow_vllm_batch.runner.segments import ResultFile, StoredRow, decode_row

Role = Literal["output", "errors", "all"]


class HoleError(RuntimeError):
    """A row has no result: a fault of ours, since every row must end in exactly one file."""


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


_decode_result = msgspec.json.Decoder(_Result).decode


@dataclass
class OutputDraft:
    """An output file on the local disk, and what was written into it."""

    role: Role
    path: Path
    file: IO[bytes]
    lines: int = 0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def write(self, line: bytes) -> None:
        self.file.write(line)
        self.lines += 1
        self.size += len(line)
        self.digest.update(line)


@dataclass
class Merged:
    """Everything that the files say."""

    drafts: list[OutputDraft]
    looks_at_forms: bool
    """Whether a row may have asked for a form; looking means reading every request again."""
    per_input: list[Counter[Outcome]]
    healable_rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    answers: AnswerTally = field(default_factory=AnswerTally)
    bad_answers_per_input: list[int] = field(default_factory=list)
    error_groups: ErrorGroups = field(default_factory=ErrorGroups)

    @property
    def counts(self) -> Counts:
        total: Counter[Outcome] = sum(self.per_input, Counter())
        return Counts(rows=total.total(), by_outcome=dict(total))

    @property
    def counts_per_input(self) -> list[Counts]:
        return [Counts(rows=counts.total(), by_outcome=dict(counts)) for counts in self.per_input]

    @property
    def usage(self) -> Usage | None:
        if not self.has_usage:
            return None
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )


def merge(plan: Plan, results: ResultFile, folder: Path, *, one_file: bool, looks_at_forms: bool) -> Merged:
    """Write the output files below ``folder``. Blocks; every result must be in a closed range.

    :param one_file: every row into one file instead of two.
    :param looks_at_forms: hold answers against the form that their rows asked for.
    :raises HoleError: where a row has no result.
    :raises OSError: where the local disk is full.
    """
    roles: tuple[Role, ...] = ("all",) if one_file else ("output", "errors")
    drafts = [OutputDraft(role, folder / f"{role}.jsonl", (folder / f"{role}.jsonl").open("wb")) for role in roles]
    merged = Merged(
        drafts, looks_at_forms, [Counter() for _ in range(plan.inputs)], bad_answers_per_input=[0] * plan.inputs
    )
    good, bad = drafts[0], drafts[-1]
    for index in range(len(plan)):
        offset = plan.result(index)
        if offset is None:
            raise HoleError(f"row {plan.key(index)} of {len(plan)} has no result")
        raw = results.read_line(offset)
        row = decode_row(raw)
        if (row.input, row.line) != plan.key(index):
            raise HoleError(f"the result at {offset} is of row {row.input}, {row.line}, not of {plan.key(index)}")
        outcome = Outcome(row.outcome)
        merged.per_input[row.input][outcome] += 1
        (good if outcome is Outcome.SUCCEEDED else bad).write(bytes(row.result) + b"\n")
        _count(merged, plan, index, row, outcome)
    for draft in drafts:
        draft.file.close()
    return merged


def _count(merged: Merged, plan: Plan, index: int, row: StoredRow, outcome: Outcome) -> None:
    result = _decode_result(row.result)
    if outcome is not Outcome.SUCCEEDED:
        merged.healable_rows += not is_final(outcome, row.code, row.status_code)
        if result.error is not None:
            merged.error_groups.add(result.error.code, result.error.message, row.custom_id, row.line)
        return
    if result.response is None:
        raise HoleError(f"row {row.input}, {row.line} succeeded without a response")
    body = result.response.body
    if tokens := tokens_of(body):
        merged.has_usage = True
        merged.prompt_tokens += tokens.prompt
        merged.completion_tokens += tokens.completion
        if tokens.cached is not None:
            merged.cached_tokens = (merged.cached_tokens or 0) + tokens.cached
    form = asked_form(plan.job(index).body) if merged.looks_at_forms else None
    merged.bad_answers_per_input[row.input] += merged.answers.add(bytes(body), form)
