"""Failures of one cause in one group, in bounded memory however many rows fail."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from airflow_vllm_batch.contract import ErrorGroup
from airflow_vllm_batch.runner.suggestions import suggestion

MAX_GROUPS = 200
EXAMPLES = 5
OTHER = "(further kinds of failures)"

_MASKS = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"'[^']*'|\"[^\"]*\""), "<text>"),
    (re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"(?<![A-Za-z_0-9])-?\d+(?:\.\d+)?"), "<n>"),
)


def mask(message: str) -> str:
    """Replace numbers, ids and quoted text, so that messages of one cause are equal. At most 300 characters."""
    for pattern, replacement in _MASKS:
        message = pattern.sub(replacement, message)
    return message if len(message) <= 300 else message[:299] + "…"


@dataclass
class _Group:
    count: int = 0
    custom_ids: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


class ErrorGroups:
    """Counts failures by code and masked message. Beyond 200 kinds the rest shares one group a code."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(self, code: str, message: str, custom_id: str | None, line: int) -> None:
        key = (code, mask(message))
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            key = (code, OTHER)
        group = self._groups.setdefault(key, _Group())
        group.count += 1
        if len(group.lines) < EXAMPLES:
            group.lines.append(line)
            if custom_id is not None:
                group.custom_ids.append(custom_id)

    def top(self, count: int | None = None) -> list[ErrorGroup]:
        """Return the groups, the most frequent first."""
        # A copy in one step: the heartbeat thread reads while the run adds groups.
        groups = list(self._groups.items())
        ranked = sorted(groups, key=lambda item: (-item[1].count, item[0]))
        return [
            ErrorGroup(
                code=code,
                message=message,
                count=group.count,
                custom_ids=list(group.custom_ids),
                lines=list(group.lines),
                suggestion=suggestion(code),
            )
            for (code, message), group in ranked[:count]
        ]
