"""A manifest as a runner would have written it, with what a test cares about changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_vllm_batch.contract import BatchSpec, Counts, InputFile, Manifest, ModelSpec, OutputTarget, RowPolicy
from airflow_vllm_batch.contract.judgement import verdict
from airflow_vllm_batch.contract.spec import EngineSpec, Limits

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
OUTPUT = "s3://b/out/"


def make_spec(**changes: Any) -> BatchSpec:
    """Return a spec; keywords of its policy and limits are sorted into these."""
    policy = RowPolicy(**{name: changes.pop(name) for name in list(changes) if name in RowPolicy.model_fields})
    limits = Limits(**{name: changes.pop(name) for name in list(changes) if name in Limits.model_fields})
    fields: dict[str, Any] = {
        "run_key": "evals-score-0000000000000000",
        "inputs": (InputFile(uri="s3://b/in.jsonl", etag='"1"', size=10),),
        "output": OutputTarget(uri=OUTPUT, state_uri=OUTPUT),
        "model": ModelSpec(name="m"),
        "engine": EngineSpec(),
        "policy": policy,
        "limits": limits,
        "attempt": 1,
    }
    return BatchSpec(**{**fields, **changes})


def make_manifest(
    spec: BatchSpec | None = None, *, by_outcome: dict[str, int] | None = None, **changes: Any
) -> Manifest:
    spec = spec or make_spec()
    counts = Counts.model_validate(
        {"rows": sum((by_outcome or {"succeeded": 3}).values()), "by_outcome": by_outcome or {"succeeded": 3}}
    )
    failed = counts.not_succeeded
    fields: dict[str, Any] = {
        "run_key": spec.run_key,
        "generation": spec.generation,
        "attempt": spec.attempt or 1,
        "epoch": spec.epoch,
        "spec_digest": spec.digest("fp"),
        "state": "completed",
        "verdict": verdict(counts, [counts], spec.policy).model_dump(),
        "inputs": [{"uri": source.uri, "etag": source.etag, "size": source.size} for source in spec.inputs],
        "outputs": [
            {"role": "output", "uri": f"{OUTPUT}output.jsonl", "lines": counts.succeeded, "bytes": 1, "sha256": "0"},
            {"role": "errors", "uri": f"{OUTPUT}errors.jsonl", "lines": failed, "bytes": 1, "sha256": "0"},
        ],
        "counts": counts.model_dump(),
        "counts_per_input": [counts.model_dump()],
        "timing": {},
        "versions": {"package": "0.1.0"},
        "model": {"name": spec.model.name, "fingerprint": "fp"},
        "started_at": STARTED,
        "finished_at": STARTED + timedelta(seconds=90),
    }
    return Manifest.model_validate({**fields, **changes})
