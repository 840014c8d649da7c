"""Manifest and thresholds to a verdict, a message and an XCom."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_vllm_batch.contract import AttemptRecord, InputFile, Manifest, OutputTarget, Usage
from airflow_vllm_batch.contract.spec import EngineSpec
from airflow_vllm_batch.judging import (
    Next,
    RunConf,
    end_message,
    failure_message,
    judge_now,
    next_for_done,
    places_of,
    read_run_conf,
    result_document,
)
from tests.support.manifests import OUTPUT, STARTED, make_manifest, make_spec

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def decide(manifest: Manifest, stored: Any = None, spec: Any = None, inputs: Any = "same") -> Next:
    spec = spec or make_spec()
    judged = judge_now(manifest, spec.policy, now=NOW, judged_by="test")
    return next_for_done(manifest, stored or make_spec(), spec, spec.inputs if inputs == "same" else inputs, judged)


# What the run's conf may say


def test_a_run_without_a_conf_changes_nothing() -> None:
    assert read_run_conf(None) == read_run_conf({}) == read_run_conf({"other": 1}) == RunConf()


def test_the_runs_conf_may_allow_other_failures_and_ask_for_a_restart() -> None:
    assert read_run_conf({"vllm_batch": {"allowed_failures": 0.02, "restart": True}}) == RunConf(0.02, restart=True)


@pytest.mark.parametrize(
    ("conf", "phrase"),
    [
        ({"allowed_failure": 1}, "found ['allowed_failure']"),
        ({"allowed_failures": 1.5}, "between 0.0 and 1.0"),
        ({"allowed_failures": True}, "is a number of rows (int) or a share"),
        ({"restart": "yes"}, "restart must be true or false"),
        ("restart", "found str"),
    ],
)
def test_a_conf_that_means_nothing_is_refused(conf: Any, phrase: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_run_conf({"vllm_batch": conf})
    assert phrase in str(caught.value)


# A run that is done


def test_a_done_run_that_asks_the_same_is_judged_and_nothing_is_started() -> None:
    assert decide(make_manifest()) is Next.JUDGE


def test_a_done_run_with_only_final_failures_is_judged_although_it_fails() -> None:
    assert decide(make_manifest(by_outcome={"succeeded": 2, "invalid": 1})) is Next.JUDGE


def test_rows_that_could_heal_run_again() -> None:
    assert decide(make_manifest(by_outcome={"succeeded": 2, "failed": 1}, healable_rows=1)) is Next.RUN


def test_a_passing_run_is_not_run_again_by_airflow_for_a_row_that_could_heal() -> None:
    spec = make_spec(allowed_failures=1)
    manifest = make_manifest(spec, by_outcome={"succeeded": 2, "failed": 1}, healable_rows=1)
    assert decide(manifest, spec, spec) is Next.JUDGE


def test_clearing_a_passing_run_runs_the_rows_that_could_heal() -> None:
    spec = make_spec(allowed_failures=1)
    manifest = make_manifest(spec, by_outcome={"succeeded": 2, "failed": 1}, healable_rows=1)
    assert decide(manifest, spec, spec.model_copy(update={"epoch": 2})) is Next.RUN


def test_clearing_with_another_threshold_judges_again_without_a_gpu() -> None:
    manifest = make_manifest(by_outcome={"succeeded": 2, "failed": 1}, healable_rows=1)
    assert decide(manifest, spec=make_spec(allowed_failures=0.5, epoch=2)) is Next.JUDGE


def test_expired_rows_wait_for_a_clear() -> None:
    manifest = make_manifest(by_outcome={"succeeded": 2, "expired": 1}, state="expired")
    assert decide(manifest) is Next.JUDGE
    assert decide(manifest, spec=make_spec(epoch=1)) is Next.RUN


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": (InputFile(uri="s3://b/other.jsonl", etag='"1"', size=10),)},
        {"inputs": (InputFile(uri="s3://b/in.jsonl", etag='"2"', size=10),)},
        {"inputs": (InputFile(uri="s3://b/in.jsonl", etag=None, size=10),)},
        {"bad_lines": "strict"},
        {"allow_parameters": ("foo",)},
        {"limit": 2},
        {"engine": EngineSpec(args={"max_model_len": 1})},
        {"seed": 1},
        {"output": OutputTarget(uri="s3://b/o2.jsonl", state_uri=OUTPUT)},
    ],
)
def test_another_question_runs(changed: dict[str, Any]) -> None:
    assert decide(make_manifest(), spec=make_spec(**changed)) is Next.RUN


def test_an_argument_that_changes_no_answer_keeps_the_run_done() -> None:
    assert decide(make_manifest(), spec=make_spec(engine=EngineSpec(args={"max_num_seqs": 8}))) is Next.JUDGE


def test_a_done_run_counts_when_its_input_is_gone() -> None:
    assert decide(make_manifest(), inputs=None) is Next.JUDGE


def test_a_folder_without_a_spec_is_not_believed() -> None:
    spec = make_spec()
    manifest = make_manifest()
    assert next_for_done(manifest, None, spec, spec.inputs, manifest.verdict) is Next.RUN


def test_judging_by_the_same_threshold_keeps_the_verdict_and_another_one_records_it() -> None:
    manifest = make_manifest(by_outcome={"succeeded": 2, "invalid": 1})
    assert judge_now(manifest, make_spec().policy, now=NOW, judged_by="test") is manifest.verdict
    judged = judge_now(manifest, make_spec(allowed_failures=0.5).policy, now=NOW, judged_by="test")
    assert judged.passed
    assert judged.overall.judged_by == "test"
    assert [before.passed for before in judged.earlier] == [False]


def test_a_share_of_every_row_is_another_threshold_than_one_row() -> None:
    manifest = make_manifest(make_spec(allowed_failures=1), by_outcome={"succeeded": 1, "invalid": 2})
    assert judge_now(manifest, make_spec(allowed_failures=1.0).policy, now=NOW, judged_by="test").passed


# What is said


def failed(**changes: Any) -> Manifest:
    groups = [
        {"code": "invalid_json", "message": "line <n>: not JSON", "count": 2, "lines": [3, 4]},
        {"code": "timeout", "message": "no answer", "count": 1, "custom_ids": ["a"], "suggestion": "raise it"},
    ]
    return make_manifest(
        by_outcome={"succeeded": 5, "failed": 1, "invalid": 2}, error_groups=groups, **{"healable_rows": 0, **changes}
    )


def test_the_failure_message_has_counts_groups_places_and_what_to_do() -> None:
    manifest = failed()
    assert failure_message(manifest, manifest.verdict).splitlines() == [
        "3 of 8 rows failed, 0 allowed (allowed_failures=0). 8 rows: 5 succeeded, 1 failed, 2 invalid.",
        "Most frequent errors:",
        "  2 × invalid_json: line <n>: not JSON (such as line 3, line 4)",
        "  1 × timeout: no answer (such as 'a') → raise it",
        "Failed rows: s3://b/out/errors.jsonl",
        "Answers: s3://b/out/output.jsonl",
        "Next: another try would end the same way, so the task is not retried. Correct the rows or the engine's "
        "arguments and clear the task, which pays only for the rows that are left; or judge again without a GPU: "
        'clear the task with the run conf {"vllm_batch": {"allowed_failures": …}} or another allowed_failures.',
    ]


def test_the_message_says_when_a_retry_can_help() -> None:
    manifest = failed(healable_rows=1)
    assert "1 of the failed rows may succeed in another try" in failure_message(manifest, manifest.verdict)


def record(**changes: Any) -> AttemptRecord:
    fields = {
        "run_key": "k",
        "generation": 1,
        "number": 2,
        "started_by": "operator",
        "started_at": STARTED,
        "ended_at": NOW,
        "log": "_vllm_batch/1/attempts/02.log.zst",
    }
    return AttemptRecord.model_validate({**fields, **changes})


def test_an_end_without_a_manifest_is_told_with_its_cause_and_what_a_retry_does() -> None:
    said = end_message("the disk is full", exit_code=74, record=record(), folder_uri=OUTPUT)
    assert said == (
        "the disk is full (exit code 74 (local disk)). Attempt 2 of s3://b/out/ after 24 h; its log: "
        "_vllm_batch/1/attempts/02.log.zst.\nFinished rows are kept: a retry runs only the rows without a result."
    )


@pytest.mark.parametrize("code", [64, 65, 78])
def test_a_final_end_says_that_a_retry_is_no_use(code: int) -> None:
    assert "so the task is not retried" in end_message("x", exit_code=code, record=None, folder_uri=OUTPUT)


@pytest.mark.parametrize("code", [69, 70, 73, 74, 75, -9, 137])
def test_any_other_end_is_worth_a_retry(code: int) -> None:
    assert "a retry runs only the rows" in end_message("x", exit_code=code, record=None, folder_uri=OUTPUT)


# XCom


def test_success_and_failure_have_the_same_keys() -> None:
    places = places_of(OUTPUT, OUTPUT)
    whole = result_document("k", make_manifest(), None, places)
    none = result_document("k", None, None, places)
    assert list(whole) == list(none)
    assert none["state"] == "failed"
    assert none["verdict"] is None
    assert whole == {
        "run_key": "k",
        "state": "completed",
        "verdict": "pass",
        "output_uri": "s3://b/out/output.jsonl",
        "errors_uri": "s3://b/out/errors.jsonl",
        "manifest_uri": "s3://b/out/manifest.json",
        "counts": {"rows": 3, "succeeded": 3, "failed": 0, "invalid": 0, "expired": 0, "cancelled": 0},
        "usage": None,
        "duration_s": 90.0,
        "rows_per_second": None,
    }


def test_the_one_object_form_names_it_for_answers_and_failures() -> None:
    outputs = [{"role": "all", "uri": "s3://b/o.jsonl", "lines": 3, "bytes": 1, "sha256": "0"}]
    places = places_of("s3://b/o.jsonl", "s3://b/o.vllm_batch/")
    document = result_document("k", make_manifest(outputs=outputs), None, places)
    assert document["output_uri"] == document["errors_uri"] == "s3://b/o.jsonl"
    assert document["manifest_uri"] == "s3://b/o.vllm_batch/manifest.json"


def test_the_xcom_stays_below_four_kibibytes_with_the_longest_keys() -> None:
    folder = f"s3://{'b' * 63}/{'k' * 1000}/"
    outputs = [
        {"role": "output", "uri": f"{folder}output.jsonl", "lines": 10**9, "bytes": 1, "sha256": "0"},
        {"role": "errors", "uri": f"{folder}errors.jsonl", "lines": 0, "bytes": 1, "sha256": "0"},
    ]
    usage = Usage(prompt_tokens=10**12, completion_tokens=10**12, total_tokens=10**12, cached_prompt_tokens=10**12)
    manifest = make_manifest(by_outcome={"succeeded": 10**9}, outputs=outputs, usage=usage)
    assert len(json.dumps(result_document("k" * 63, manifest, None, places_of(folder, folder)))) < 4096
