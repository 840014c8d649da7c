"""A manifest for people, in plain text."""

from __future__ import annotations

from airflow_vllm_batch.contract import Manifest, Outcome

GROUPS_SHOWN = 5


def summary(manifest: Manifest) -> str:
    """Return verdict, counts, tokens, the most frequent failures and where the files are."""
    counts = manifest.counts
    outcomes = ", ".join(
        f"{counts.by_outcome[outcome]:,} {outcome}" for outcome in Outcome if outcome in counts.by_outcome
    )
    lines = [
        f"{'PASS' if manifest.verdict.passed else 'FAIL'}: {manifest.verdict.overall.reason}",
        f"rows     {counts.rows:,} ({outcomes or 'none'})"
        + (f", {manifest.rows_reused:,} kept from earlier tries" if manifest.rows_reused else ""),
    ]
    if (usage := manifest.usage) is not None:
        cached = f" ({usage.cached_prompt_tokens:,} cached)" if usage.cached_prompt_tokens is not None else ""
        lines.append(f"tokens   {usage.prompt_tokens:,} prompt{cached}, {usage.completion_tokens:,} completion")
    timing = manifest.timing
    parts = [
        f"{name} {seconds:.1f} s"
        for name, seconds in (
            ("engine start", timing.engine_start),
            ("rows", timing.run),
            ("write", timing.write),
            ("total", timing.total),
        )
        if seconds is not None
    ]
    if parts:
        lines.append(f"time     {', '.join(parts)}")
    for group in manifest.error_groups[:GROUPS_SHOWN]:
        examples = ", ".join(map(repr, group.custom_ids)) or "line " + ", ".join(map(str, group.lines))
        lines.append(f"failed   {group.count:,} × {group.code}: {group.message} (such as {examples})")
    lines += [f"{output.role:<8} {output.uri}" for output in manifest.outputs]
    return "\n".join(lines) + "\n"
