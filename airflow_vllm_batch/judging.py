"""What a run is worth, and what to say of it: manifest and thresholds to a verdict, a message and an XCom. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from airflow_vllm_batch.contract import (
    AttemptRecord,
    BatchSpec,
    ErrorGroup,
    ExitCode,
    InputFile,
    Manifest,
    Outcome,
    RowPolicy,
    RunLayout,
    Verdict,
)
from airflow_vllm_batch.contract.judgement import judge_again
from airflow_vllm_batch.contract.layout import is_one_file
from airflow_vllm_batch.contract.progress_line import duration
from airflow_vllm_batch.contract.spec import check_threshold
from airflow_vllm_batch.storage.fingerprint import fingerprints_of
from airflow_vllm_batch.storage.uris import join_uri

CONF_KEY = "vllm_batch"
_GROUPS_SHOWN = 5
_MESSAGE_SHOWN = 300


class RunConf(NamedTuple):
    """What the DAG run's conf asks of every batch in it."""

    allowed_failures: int | float | None = None
    restart: bool = False


def read_run_conf(conf: Mapping[str, Any] | None) -> RunConf:
    """Read ``{"vllm_batch": {"allowed_failures": 0.02, "restart": true}}``; both members are optional.

    :raises ValueError: for another member or a value of the wrong type.
    """
    given = (conf or {}).get(CONF_KEY)
    if given is None:
        return RunConf()
    if not isinstance(given, Mapping) or (unknown := set(given) - {"allowed_failures", "restart"}):
        found = sorted(map(str, unknown)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"run conf {CONF_KEY!r} may hold 'allowed_failures' and 'restart', found {found}")
    restart = given.get("restart", False)
    if not isinstance(restart, bool):
        raise ValueError(f"run conf {CONF_KEY}.restart must be true or false, got {restart!r}")
    threshold = given.get("allowed_failures")
    return RunConf(None if threshold is None else check_threshold("run conf allowed_failures", threshold), restart)


# A run that is done


class Next(Enum):
    RUN = "run"
    JUDGE = "judge"
    """The manifest answers what is asked: nothing is started."""


def next_for_done(
    manifest: Manifest,
    stored: BatchSpec | None,
    spec: BatchSpec,
    inputs_now: Sequence[InputFile] | None,
    verdict: Verdict,
) -> Next:
    """Decide whether a manifest that is done answers this task.

    It does where it is about the same question and no row could come out otherwise. Where rows could, it does so
    only if it passes and nobody asked for them: the same epoch (Airflow's retry), or another threshold than the one
    that it was judged by.

    :param stored: the spec that the manifest's rows were run by.
    :param inputs_now: with the ETags and sizes of now; null where that can't be told any more.
    :param verdict: by the thresholds of now.
    """
    if stored is None or not _same_question(manifest, stored, spec):
        return Next.RUN
    if inputs_now is not None and not _same_inputs(manifest, inputs_now):
        return Next.RUN
    if rows_left(manifest, epoch=spec.epoch) == 0:
        return Next.JUDGE
    asked_anew = (
        spec.epoch != manifest.epoch and spec.policy.allowed_failures == manifest.verdict.overall.allowed_failures
    )
    return Next.JUDGE if verdict.passed and not asked_anew else Next.RUN


def rows_left(manifest: Manifest, *, epoch: int) -> int:
    """Return how many rows another try of this epoch would run: an expired or cancelled row waits for a clear."""
    if epoch == manifest.epoch:
        return manifest.healable_rows
    by_outcome = manifest.counts.by_outcome
    return manifest.healable_rows + by_outcome.get(Outcome.EXPIRED, 0) + by_outcome.get(Outcome.CANCELLED, 0)


def _same_question(manifest: Manifest, stored: BatchSpec, spec: BatchSpec) -> bool:
    def asked(of: BatchSpec) -> tuple[object, ...]:
        rules = of.policy.model_copy(
            update={"allowed_failures": 0, "allowed_failures_per_input": (), "run_anyway": False}
        )
        return ([source.uri for source in of.inputs], of.output, rules, of.limits.limit, of.limits.max_row_bytes)

    # A model that can't be seen from here, as one on a GPU host, is taken to be the one that ran.
    seen = fingerprints_of(spec)
    digest = spec.digest(
        seen.model or manifest.model.fingerprint,
        {name: found or manifest.model.adapters.get(name) for name, found in seen.adapters.items()},
    )
    return asked(stored) == asked(spec) and digest == manifest.spec_digest


def _same_inputs(manifest: Manifest, inputs_now: Sequence[InputFile]) -> bool:
    # Without an ETag nobody can tell: the runner then looks at the bytes, and starts no engine where none changed.
    return [(read.uri, read.etag) for read in manifest.inputs] == [
        (source.uri, source.etag) for source in inputs_now if source.etag is not None
    ]


def judge_now(manifest: Manifest, policy: RowPolicy, *, now: datetime, judged_by: str) -> Verdict:
    """Return the manifest's verdict where it was reached by this threshold, else a new one that keeps it."""
    overall = manifest.verdict.overall
    same_type = type(overall.allowed_failures) is type(policy.allowed_failures)
    if same_type and overall.allowed_failures == policy.allowed_failures:
        return manifest.verdict
    return judge_again(manifest, policy, judged_at=now, judged_by=judged_by)


# What is said


def failure_message(manifest: Manifest, verdict: Verdict) -> str:
    """Say what failed, how often and where to look, what was allowed, and what to do next."""
    counts = ", ".join(f"{count:,} {outcome.value}" for outcome, count in manifest.counts.by_outcome.items() if count)
    lines = [
        f"{verdict.overall.reason}. {manifest.counts.rows:,} rows: {counts}.",
        *(judgement.reason for judgement in verdict.per_input if judgement is not None and not judgement.passed),
    ]
    if manifest.error_groups:
        lines.append("Most frequent errors:")
        lines += [f"  {_group(group)}" for group in manifest.error_groups[:_GROUPS_SHOWN]]
    output_uri, errors_uri = result_uris(manifest)
    lines += [f"Failed rows: {errors_uri}", f"Answers: {output_uri}", _advice(manifest)]
    return "\n".join(lines)


def _group(group: ErrorGroup) -> str:
    examples = [repr(custom_id) for custom_id in group.custom_ids] or [f"line {line}" for line in group.lines]
    named = f" (such as {', '.join(examples)})" if examples else ""
    suggestion = f" → {group.suggestion}" if group.suggestion else ""
    return f"{group.count:,} × {group.code}: {group.message[:_MESSAGE_SHOWN]}{named}{suggestion}"


def _advice(manifest: Manifest) -> str:
    judging = (
        f'or judge again without a GPU: clear the task with the run conf {{"{CONF_KEY}": {{"allowed_failures": …}}}} '
        "or another allowed_failures"
    )
    if manifest.healable_rows:
        return (
            f"Next: {manifest.healable_rows:,} of the failed rows may succeed in another try. A retry, or clearing the "
            f"task, runs only these and pays for no finished row again; {judging}."
        )
    return (
        "Next: another try would end the same way, so the task is not retried. Correct the rows or the engine's "
        f"arguments and clear the task, which pays only for the rows that are left; {judging}."
    )


def end_message(reason: str, *, exit_code: int | None, record: AttemptRecord | None, folder_uri: str) -> str:
    """Say why a try ended without a manifest, and what a retry does."""
    code = f" (exit code {ExitCode.describe(exit_code)})" if exit_code is not None else ""
    where = f" Attempt {record.number} of {folder_uri}" if record else ""
    after = (
        f" after {duration((record.ended_at - record.started_at).total_seconds())}"
        if record and record.ended_at
        else ""
    )
    log = f"; its log: {record.log}" if record and record.log else ""
    final = is_final(exit_code, record)
    what_next = (
        "Another try would end the same way, so the task is not retried: change what the message names, then clear it."
        if final
        else "Finished rows are kept: a retry runs only the rows without a result."
    )
    return f"{reason}{code}.{where}{after}{log}.\n{what_next}" if where else f"{reason}{code}.\n{what_next}"


def is_final(exit_code: int | None, record: AttemptRecord | None = None) -> bool:
    """Whether another try would end the same way."""
    if exit_code is not None:
        try:
            if ExitCode(exit_code).final:
                return True
        except ValueError:
            return False
    return bool(record and record.final)


def result_uris(manifest: Manifest) -> tuple[str, str]:
    """Return where answers and failed rows lie: the same object in the one-file form."""
    by_role = {output.role: output.uri for output in reversed(manifest.outputs)}
    whole = by_role.get("all", "")
    return by_role.get("output", whole), by_role.get("errors", whole)


class Places(NamedTuple):
    """Where a run's files lie, or will lie once a try gets that far."""

    output_uri: str
    errors_uri: str
    manifest_uri: str


def places_of(output_uri: str, state_uri: str) -> Places:
    """Return where a run's files lie, or will lie.

    :param state_uri: the same as ``output_uri`` but for the one-object form.
    """
    manifest = join_uri(state_uri, RunLayout.manifest)
    if is_one_file(output_uri):
        return Places(output_uri, output_uri, manifest)
    return Places(join_uri(output_uri, RunLayout.output), join_uri(output_uri, RunLayout.errors), manifest)


def result_document(run_key: str, manifest: Manifest | None, verdict: Verdict | None, places: Places) -> dict[str, Any]:
    """Return what goes to XCom: small, flat, without rows and secrets, the same keys after success and failure."""
    if manifest is None:
        return {
            "run_key": run_key,
            "state": "failed",
            "verdict": None,
            **places._asdict(),
            "counts": None,
            "usage": None,
            "duration_s": None,
            "rows_per_second": None,
        }
    output_uri, errors_uri = result_uris(manifest)
    judged = verdict or manifest.verdict
    by_outcome = {outcome.value: manifest.counts.by_outcome.get(outcome, 0) for outcome in Outcome}
    speed = manifest.throughput.rows_per_second if manifest.throughput else None
    return {
        "run_key": run_key,
        "state": manifest.state.value,
        "verdict": "pass" if judged.passed else "fail",
        "output_uri": output_uri,
        "errors_uri": errors_uri,
        "manifest_uri": places.manifest_uri,
        "counts": {"rows": manifest.counts.rows, **by_outcome},
        "usage": manifest.usage.model_dump(exclude_none=True) if manifest.usage else None,
        "duration_s": round((manifest.finished_at - manifest.started_at).total_seconds(), 3),
        "rows_per_second": round(speed, 3) if speed is not None else None,
    }
