"""One key for every try of a task instance: what owns an output folder, and what a retry finds its rows by."""

from __future__ import annotations

import hashlib
import re

_DIGEST_LENGTH = 16
_SLUG_LENGTH = 63 - 1 - _DIGEST_LENGTH


def run_key(dag_id: str, run_id: str, task_id: str, map_index: int | None = None) -> str:
    """Return a readable slug and 16 hex digits, ``[a-z0-9-]{1,63}``; never the try number.

    :param map_index: null and -1 both mean a task that is not mapped.
    """
    index = -1 if map_index is None else map_index
    identity = "\0".join((dag_id, run_id, task_id, str(index)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGEST_LENGTH]
    words = f"{dag_id}-{task_id}" if index < 0 else f"{dag_id}-{task_id}-{index}"
    slug = re.sub(r"[^a-z0-9]+", "-", words.lower())[:_SLUG_LENGTH].strip("-")
    return f"{slug}-{digest}" if slug else digest
