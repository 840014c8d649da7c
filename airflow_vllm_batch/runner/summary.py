"""Everything that is known at the end of a try, in the manifest's words. Pure."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import datetime

from airflow_vllm_batch import __version__
from airflow_vllm_batch.contract import BatchSpec, Manifest, Outcome, OutputFile, Usage
from airflow_vllm_batch.contract.judgement import verdict
from airflow_vllm_batch.contract.manifest import (
    Cost,
    ManifestState,
    ModelIdentity,
    Throughput,
    Timing,
    Versions,
)
from airflow_vllm_batch.runner.engine.base import EngineInfo
from airflow_vllm_batch.runner.intake import Intake
from airflow_vllm_batch.runner.merge import Merged
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.storage.fingerprint import Fingerprints


def build_manifest(
    spec: BatchSpec,
    *,
    spec_digest: str,
    fingerprints: Fingerprints,
    attempt: int,
    attempts: int,
    intake: Intake,
    info: EngineInfo | None,
    merged: Merged,
    outputs: Sequence[OutputFile],
    state: RunState,
    timing: Timing,
    finished_at: datetime,
) -> Manifest:
    """Return the manifest of a run of which every row is in a file.

    :param info: null where no engine was needed in this try.
    """
    gpu_seconds = _gpu_seconds(info, timing)
    manifest_state = _state(merged)
    return Manifest(
        run_key=spec.run_key,
        generation=spec.generation,
        attempt=attempt,
        epoch=spec.epoch,
        spec_digest=spec_digest,
        state=manifest_state,
        verdict=verdict(
            merged.counts,
            merged.counts_per_input,
            spec.policy,
            bad_answers_per_input=merged.bad_answers_per_input,
            state=manifest_state,
            judged_at=finished_at,
            judged_by="runner",
        ),
        inputs=intake.inputs,
        outputs=list(outputs),
        counts=merged.counts,
        counts_per_input=merged.counts_per_input,
        healable_rows=merged.healable_rows,
        answers=merged.answers.document(),
        bad_answers_per_input=merged.bad_answers_per_input,
        unknown_parameters=dict(intake.unknown_parameters),
        usage=_usage(merged, intake),
        timing=timing,
        throughput=_throughput(state, timing),
        timeline=state.timeline(),
        gpu_seconds=gpu_seconds,
        cost=_cost(spec, gpu_seconds),
        error_groups=merged.error_groups.top(),
        attempts=attempts,
        rows_reused=state.rows_reused,
        versions=Versions(package=__version__, vllm=info.version if info else None, python=platform.python_version()),
        model=ModelIdentity(
            name=spec.model.name,
            served_names=list(info.served_names if info else spec.model.accepted_names),
            fingerprint=fingerprints.model,
            adapters=dict(fingerprints.adapters),
        ),
        seed=spec.seed,
        engine=info.values if info else {},
        hardware=info.hardware.model_copy(update={"node": state.node}) if info and info.hardware else None,
        started_at=state.started_at,
        finished_at=finished_at,
    )


def _state(merged: Merged) -> ManifestState:
    """Return what the files say: also a try that only merges what a cancelled one left is a cancelled one."""
    by_outcome = merged.counts.by_outcome
    if by_outcome.get(Outcome.CANCELLED):
        return ManifestState.CANCELLED
    return ManifestState.EXPIRED if by_outcome.get(Outcome.EXPIRED) else ManifestState.COMPLETED


def _usage(merged: Merged, intake: Intake) -> Usage | None:
    usage = merged.usage
    if usage is not None and usage.cached_prompt_tokens is None:
        return usage.model_copy(update={"cached_prompt_tokens": intake.cached_prompt_tokens})
    return usage


def _gpu_seconds(info: EngineInfo | None, timing: Timing) -> float | None:
    devices = (info.hardware.gpu_count if info and info.hardware else None) or 0
    return devices * ((timing.engine_start or 0.0) + (timing.run or 0.0)) if devices else None


def _throughput(state: RunState, timing: Timing) -> Throughput | None:
    """Return rates over the time in which rows ran in this try; null where none did."""
    if not timing.run or not state.rows_answered:
        return None
    return Throughput(
        rows_per_second=state.rows_answered / timing.run,
        prompt_tokens_per_second=state.prompt_tokens / timing.run,
        completion_tokens_per_second=state.completion_tokens / timing.run,
    )


def _cost(spec: BatchSpec, gpu_seconds: float | None) -> Cost | None:
    if spec.pricing is None or gpu_seconds is None:
        return None
    return Cost(
        amount=gpu_seconds / 3600 * spec.pricing.gpu_hour_price,
        currency=spec.pricing.currency,
        gpu_hour_price=spec.pricing.gpu_hour_price,
    )
