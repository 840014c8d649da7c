"""Counts and thresholds to a verdict. Pure, and the same on both sides: the runner judges, an operator judges again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from fractions import Fraction

from airflow_vllm_batch.contract.manifest import Counts, Judgement, Manifest, ManifestState, Verdict
from airflow_vllm_batch.contract.spec import RowPolicy, check_threshold


def allowed_rows(allowed_failures: int | float, rows: int) -> int:
    """Return how many of so many rows may fail: an int as it is, a float's share of the rows, rounded down.

    The share is the decimal number that a person wrote: 0.29 of 100 rows are 29, though binary arithmetic says 28.
    """
    if isinstance(allowed_failures, float):
        return math.floor(Fraction(repr(float(allowed_failures))) * rows)
    return allowed_failures


def judge(
    counts: Counts,
    allowed_failures: int | float,
    *,
    state: ManifestState = ManifestState.COMPLETED,
    bad_answers: int = 0,
    what: str = "",
    judged_at: datetime | None = None,
    judged_by: str | None = None,
) -> Judgement:
    """Hold rows against a threshold. Every row of ``errors.jsonl`` counts as failed; a cancelled run never passes.

    :param allowed_failures: an int is a number of rows, a float a share of them.
    :param bad_answers: succeeded rows that count as failed all the same.
    :param what: what the reason is to call these rows, such as ``input 2: ``.
    :raises ValueError: where ``allowed_failures`` is no threshold.
    """
    check_threshold("allowed_failures", allowed_failures)
    allowed = allowed_rows(allowed_failures, counts.rows)
    failed = counts.not_succeeded + bad_answers
    written = f"{allowed_failures}" if isinstance(allowed_failures, int) else f"{allowed_failures} of {counts.rows}"
    reason = f"{what}{failed} of {counts.rows} rows failed, {allowed} allowed (allowed_failures={written})"
    if bad_answers:
        reason += f", {bad_answers} of them for a bad answer"
    passed = failed <= allowed
    if state is ManifestState.CANCELLED:
        passed, reason = False, f"{what}cancelled, so it can't pass; {reason.removeprefix(what)}"
    elif counts.rows == 0:
        passed, reason = False, f"{what}no rows, so there is nothing to pass"
    return Judgement(
        passed=passed,
        allowed_failures=allowed_failures,
        allowed_rows=allowed,
        failed_rows=failed,
        reason=reason,
        judged_at=judged_at,
        judged_by=judged_by,
    )


def verdict(
    counts: Counts,
    counts_per_input: Sequence[Counts],
    policy: RowPolicy,
    *,
    bad_answers_per_input: Sequence[int] = (),
    state: ManifestState = ManifestState.COMPLETED,
    judged_at: datetime | None = None,
    judged_by: str | None = None,
    earlier: Sequence[Judgement] = (),
) -> Verdict:
    """Judge a whole run, and each input that has a threshold of its own: it passes where all of them do."""
    # Empty where answers were not looked at, or where bad ones are only counted.
    bad = list(bad_answers_per_input) if policy.bad_answers == "fail" else []
    overall = judge(
        counts,
        policy.allowed_failures,
        state=state,
        bad_answers=sum(bad),
        judged_at=judged_at,
        judged_by=judged_by,
    )
    per_input = [
        None
        if threshold is None
        else judge(
            of_input,
            threshold,
            state=state,
            bad_answers=bad[index] if bad else 0,
            what=f"input {index}: ",
            judged_at=judged_at,
            judged_by=judged_by,
        )
        for index, (of_input, threshold) in enumerate(
            zip(counts_per_input, policy.allowed_failures_per_input, strict=bool(policy.allowed_failures_per_input))
        )
    ]
    return Verdict(
        passed=overall.passed and all(judgement is None or judgement.passed for judgement in per_input),
        overall=overall,
        per_input=per_input,
        earlier=list(earlier),
    )


def judge_again(manifest: Manifest, policy: RowPolicy, *, judged_at: datetime, judged_by: str) -> Verdict:
    """Judge a finished run by a policy of now; the judgement before is kept among the earlier ones."""
    return verdict(
        manifest.counts,
        manifest.counts_per_input,
        policy,
        bad_answers_per_input=manifest.bad_answers_per_input,
        state=manifest.state,
        judged_at=judged_at,
        judged_by=judged_by,
        earlier=[*manifest.verdict.earlier, manifest.verdict.overall],
    )
