"""The documents that both sides share: golden ones of each contract version, strictness, and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from airflow_vllm_batch.contract import (
    CONTRACT_VERSION,
    AttemptRecord,
    BatchSpec,
    CancelRequest,
    ContractVersionError,
    Counts,
    ErrorCode,
    ExitCode,
    InputFile,
    Lease,
    Manifest,
    ModelSpec,
    Outcome,
    OutputTarget,
    Progress,
    RowPolicy,
    RunLayout,
    RunOwner,
    SegmentRow,
)
from airflow_vllm_batch.contract.layout import default_state_uri, is_one_file
from airflow_vllm_batch.contract.rows import is_final
from airflow_vllm_batch.contract.spec import Adapter, EngineSpec, Limits

GOLDEN = Path(__file__).parent / "golden"
MODELS: dict[str, type[BaseModel]] = {
    "spec": BatchSpec,
    "run": RunOwner,
    "lease": Lease,
    "cancel": CancelRequest,
    "progress": Progress,
    "attempt": AttemptRecord,
    "manifest": Manifest,
    "segment_row": SegmentRow,
}
VERSIONED = [name for name in MODELS if name != "segment_row"]


def golden(name: str, version: str = CONTRACT_VERSION) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / version / f"{name}.json").read_text()))


def spec(**changes: Any) -> BatchSpec:
    fields: dict[str, Any] = {
        "run_key": "a-run",
        "inputs": (InputFile(uri="in.jsonl"),),
        "output": OutputTarget(uri="out/", state_uri="out/"),
        "model": ModelSpec(name="m"),
    }
    return BatchSpec(**{**fields, **changes})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("version", sorted(folder.name for folder in GOLDEN.iterdir()))
def test_documents_of_every_contract_version_still_load(version: str, name: str) -> None:
    MODELS[name].model_validate(golden(name, version))


@pytest.mark.parametrize("name", MODELS)
def test_a_document_of_this_version_is_written_as_it_was_read(name: str) -> None:
    document = golden(name)
    assert json.loads(MODELS[name].model_validate(document).model_dump_json()) == document


@pytest.mark.parametrize("name", MODELS)
def test_the_golden_document_has_every_field_so_a_new_one_changes_it(name: str) -> None:
    assert set(golden(name)) == set(MODELS[name].model_fields)


@pytest.mark.parametrize("name", VERSIONED)
def test_another_major_version_is_refused_before_its_fields_are_looked_at(name: str) -> None:
    raw = json.dumps({"contract_version": "2.0", "of_the_future": True}).encode()
    with pytest.raises(ContractVersionError, match=r"has contract_version '2\.0', this package reads 1\.x: install"):
        MODELS[name].read(raw, f"{name}.json")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VERSIONED)
def test_a_newer_minor_version_is_read(name: str) -> None:
    MODELS[name].read(json.dumps({**golden(name), "contract_version": "1.9"}), name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["spec", "run", "cancel"])
def test_what_a_person_writes_is_refused_with_an_unknown_field(name: str) -> None:
    raw = json.dumps({**golden(name), "generaton": 1})
    with pytest.raises(ValueError, match=rf"{name}\.json is not a valid .*: generaton: Extra inputs are not permitted"):
        MODELS[name].read(raw, f"{name}.json")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["lease", "progress", "attempt", "manifest"])
def test_what_the_runner_writes_is_read_with_fields_of_a_newer_one(name: str) -> None:
    MODELS[name].read(json.dumps({**golden(name), "news": [1, 2]}), name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff"])
def test_what_is_no_document_is_a_clear_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json (is not JSON|must be one JSON object)"):
        Manifest.read(raw, "manifest.json")


def test_counts_that_do_not_add_up_do_not_exist() -> None:
    with pytest.raises(ValidationError, match="3 outcomes for 4 rows"):
        Counts(rows=4, by_outcome={Outcome.SUCCEEDED: 2, Outcome.FAILED: 1})


def test_a_manifest_whose_files_miss_a_row_does_not_exist() -> None:
    document = golden("manifest")
    document["outputs"][0]["lines"] -= 1
    with pytest.raises(ValidationError, match="99 lines in the outputs for 100 rows"):
        Manifest.model_validate(document)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (1, 1), (0.0, 0.0), (1.0, 1.0), (0.01, 0.01), (10_000, 10_000)]
)
def test_a_threshold_survives_json_as_the_count_or_share_it_is(value: float, expected: float) -> None:
    raw = spec(policy=RowPolicy(allowed_failures=value)).to_bytes()
    found = BatchSpec.read(raw, "spec.json").policy.allowed_failures
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "is a number of rows"),
        ("1", "is a number of rows"),
        (None, "is a number of rows"),
        (-1, "can't be negative"),
        (1.5, "must lie between 0.0 and 1.0"),
        (-0.1, "must lie between 0.0 and 1.0"),
        (float("nan"), "must lie between 0.0 and 1.0"),
    ],
)
def test_what_is_no_threshold_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RowPolicy(allowed_failures=value)


def test_a_signed_url_never_stands_in_a_spec() -> None:
    with pytest.raises(ValidationError, match="without its query"):
        InputFile(uri="https://host/in.jsonl?X-Amz-Signature=secret")
    with pytest.raises(ValidationError, match="without its query"):
        OutputTarget(uri="https://user:secret@host/out.jsonl", state_uri="s3://b/state/")
    assert InputFile(uri="s3://bucket/a?b#c.jsonl").uri == "s3://bucket/a?b#c.jsonl"


@pytest.mark.parametrize("run_key", ["", "A", "a_b", "a" * 64, "a b", "a/b"])
def test_a_run_key_fits_into_names_and_labels(run_key: str) -> None:
    with pytest.raises(ValidationError, match="a run key is 1 to 63 characters"):
        spec(run_key=run_key)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": ModelSpec(name="other")},
        {"model": ModelSpec(name="m", fingerprint="hub:1")},
        {"model": ModelSpec(name="m", served_names=("n",))},
        {"model": ModelSpec(name="m", revision="v2")},
        {"model": ModelSpec(name="m", adapters=(Adapter(name="l", uri="/l"),))},
        {"engine": EngineSpec(args={"max_model_len": 10})},
        {"engine": EngineSpec(args={"quantization": "fp8"})},
        {"engine": EngineSpec(kind="echo")},
        {"seed": 1},
    ],
)
def test_whatever_changes_answers_changes_the_digest(changed: dict[str, Any]) -> None:
    assert spec(**changed).digest() != spec().digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": RowPolicy(allowed_failures=9, bad_lines="strict")},
        {"limits": Limits(row_retries=0, max_in_flight=1, order="input")},
        {"engine": EngineSpec(args={"tensor_parallel_size": 4, "gpu_memory_utilization": 0.5, "max_num_seqs": 8})},
        {"engine": EngineSpec(args={"-tp": 4})},
        {"inputs": (InputFile(uri="elsewhere.jsonl"),)},
        {"output": OutputTarget(uri="x/", state_uri="x/"), "attempt": 4, "epoch": 2},
        {"labels": {"dag": "d"}, "shards": 3},
    ],
)
def test_what_does_not_change_answers_keeps_the_digest(changed: dict[str, Any]) -> None:
    assert spec(**changed).digest() == spec().digest()


def test_the_digest_is_the_same_for_a_fingerprint_found_before_or_after() -> None:
    known = spec(
        model=ModelSpec(name="m", fingerprint="path:1", adapters=(Adapter(name="l", uri="/l", fingerprint="2"),))
    )
    found = spec(model=ModelSpec(name="m", adapters=(Adapter(name="l", uri="/l"),)))
    assert known.digest() == found.digest("path:1", {"l": "2"})
    # Stored in segments and manifests: another value would run every finished row again.
    assert spec().digest() == "e30c079e09d0f5f1d89f5017e14e9e69"


@pytest.mark.parametrize(
    ("outcome", "code", "status", "final"),
    [
        (Outcome.SUCCEEDED, None, 200, True),
        (Outcome.INVALID, "invalid_json", None, True),
        (Outcome.EXPIRED, "expired", None, True),
        (Outcome.CANCELLED, "cancelled", None, True),
        (Outcome.FAILED, "engine_crash", None, True),
        (Outcome.FAILED, "engine_rejected", 400, True),
        (Outcome.FAILED, "engine_rejected", 422, True),
        (Outcome.FAILED, "rate_limited", 429, False),
        (Outcome.FAILED, "timeout", 408, False),
        (Outcome.FAILED, "engine_rejected", 403, False),
        (Outcome.FAILED, "server_error", 503, False),
        (Outcome.FAILED, "timeout", None, False),
        (Outcome.FAILED, "connection_lost", None, False),
    ],
)
def test_which_results_a_retry_keeps(outcome: Outcome, code: str | None, status: int | None, final: bool) -> None:
    assert is_final(outcome, code, status) is final


def test_object_names_are_the_ones_that_were_promised() -> None:
    layout = RunLayout(2)
    assert [layout.output, layout.errors, layout.manifest, layout.run] == [
        "output.jsonl",
        "errors.jsonl",
        "manifest.json",
        "_vllm_batch/run.json",
    ]
    assert [layout.spec, layout.lease(), layout.progress(), layout.cancel] == [
        "_vllm_batch/2/spec.json",
        "_vllm_batch/2/lease.json",
        "_vllm_batch/2/progress.json",
        "_vllm_batch/2/cancel.json",
    ]
    assert [layout.lease(3), layout.progress(3), layout.attempt(4, 3), layout.attempt_log(4, 3), layout.part(3)] == [
        "_vllm_batch/2/lease-00003.json",
        "_vllm_batch/2/progress-00003.json",
        "_vllm_batch/2/attempts/04-00003.json",
        "_vllm_batch/2/attempts/04-00003.log.zst",
        "_vllm_batch/2/parts/00003.json",
    ]
    assert layout.staged_input(0) == "_vllm_batch/2/input/00.jsonl.zst"
    assert layout.segment(1, 2) == "_vllm_batch/2/segments/01-00000-000002.jsonl.zst"
    assert layout.sharded(layout.output, 2, 8) == "output-00002-of-00008.jsonl"
    assert [RunLayout.attempt_number(name) for name in ("_vllm_batch/2/attempts/07.json", "attempts/07.log.zst")] == [
        7,
        None,
    ]


@pytest.mark.parametrize(
    ("output", "one_file", "state"),
    [
        ("s3://b/run/", False, "s3://b/run/"),
        ("s3://b/run", False, "s3://b/run/"),
        ("/data/all.jsonl", True, "/data/all.vllm_batch/"),
        ("s3://b/x.jsonl", True, "s3://b/x.vllm_batch/"),
        ("https://host/put", True, None),
    ],
)
def test_the_form_of_an_output_follows_its_name(output: str, one_file: bool, state: str | None) -> None:
    assert (is_one_file(output), default_state_uri(output)) == (one_file, state)


def test_exit_codes_are_the_promised_numbers() -> None:
    assert [int(code) for code in ExitCode] == [0, 3, 64, 65, 69, 70, 73, 74, 75, 78]
    assert [code for code in ExitCode if code.final] == [ExitCode.USAGE, ExitCode.INPUT_REFUSED, ExitCode.ENGINE_CONFIG]
    assert [ExitCode.describe(code) for code in (75, -9, 137, 99)] == [
        "75 (resumable)",
        "-9 (killed by signal 9)",
        "137 (killed by signal 9)",
        "99 (unknown)",
    ]


def test_every_code_of_the_cases_is_in_the_one_list() -> None:
    codes = json.loads((Path(__file__).parents[1] / "cases" / "index.json").read_text())["codes"]
    assert set(codes) <= {code.value for code in ErrorCode}


def test_an_engine_is_given_only_what_it_knows() -> None:
    with pytest.raises(ValidationError, match="server_url goes with engine kind 'server'"):
        EngineSpec(kind="server")
    with pytest.raises(ValidationError, match="mean nothing to engine kind 'echo'"):
        EngineSpec(kind="echo", args={"max_model_len": 1})
    with pytest.raises(ValidationError, match="delay_seconds goes with engine kind 'echo'"):
        EngineSpec(delay_seconds=1.0)
