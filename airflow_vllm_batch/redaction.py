"""Secrets out of text that is about to be shown. Plain replacement: no guessing at what looks like a secret."""

from __future__ import annotations

from collections.abc import Iterable

from airflow_vllm_batch.contract.spec import without_query

MASK = "***"
_SHORTEST = 5
"""As Airflow's own masker: replacing shorter values would only garble words."""


class Redactor:
    """Replaces known secrets. Longest first, so that one which holds another leaves nothing behind."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.secrets = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text


def masked_url(uri: str) -> str:
    """Return what may be shown and stored of a URI: an http(s) URL without user part, its query masked."""
    public = without_query(uri)
    return f"{public}?{MASK}" if public != uri and "?" in uri else public
