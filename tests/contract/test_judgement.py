"""Counts and thresholds to a verdict."""

from __future__ import annotations

import pytest

from airflow_vllm_batch.contract import Counts, RowPolicy
from airflow_vllm_batch.contract.judgement import allowed_rows, judge, verdict
from airflow_vllm_batch.contract.manifest import ManifestState


def counts(rows: int, failed: int) -> Counts:
    return Counts.model_validate({"rows": rows, "by_outcome": {"succeeded": rows - failed, "failed": failed}})


@pytest.mark.parametrize(
    ("allowed_failures", "rows", "allowed"),
    [
        (0, 100, 0),
        (1, 100, 1),
        (1.0, 100, 100),
        (0.29, 100, 29),
        (0.07, 100, 7),
        (0.1, 3, 0),
        (1e-05, 100_000, 1),
        (0.0, 100, 0),
    ],
)
def test_an_int_is_a_number_of_rows_and_a_float_a_share_rounded_down(
    allowed_failures: int | float, rows: int, allowed: int
) -> None:
    assert allowed_rows(allowed_failures, rows) == allowed


def test_a_run_passes_up_to_the_threshold_and_not_beyond_it() -> None:
    assert judge(counts(10, 2), 2).passed
    assert not judge(counts(10, 3), 2).passed
    assert judge(counts(10, 3), 2).reason == "3 of 10 rows failed, 2 allowed (allowed_failures=2)"


def test_every_row_that_did_not_succeed_counts_as_failed() -> None:
    mixed = Counts.model_validate({"rows": 4, "by_outcome": {"succeeded": 1, "invalid": 1, "expired": 1, "failed": 1}})
    assert judge(mixed, 3).failed_rows == 3


def test_a_cancelled_run_never_passes_whatever_is_allowed() -> None:
    judged = judge(counts(10, 0), 1.0, state=ManifestState.CANCELLED)
    assert not judged.passed
    assert judged.reason.startswith("cancelled")


def test_a_run_without_rows_never_passes() -> None:
    assert not judge(counts(0, 0), 1.0).passed


def test_a_threshold_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0\.0 and 1\.0"):
        judge(counts(10, 0), 1.5)


def test_each_input_with_a_threshold_of_its_own_has_to_pass_too() -> None:
    policy = RowPolicy(allowed_failures=1.0, allowed_failures_per_input=(None, 0))
    judged = verdict(counts(20, 3), [counts(10, 2), counts(10, 1)], policy)
    assert judged.overall.passed
    assert not judged.passed
    assert judged.per_input[0] is None
    assert judged.per_input[1] is not None
    assert judged.per_input[1].reason.startswith("input 1: 1 of 10 rows failed")
