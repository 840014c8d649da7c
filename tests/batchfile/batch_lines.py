"""Makes lines of batch files for tests."""

from __future__ import annotations

import json
from typing import Any

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, SCORE, RERANK = "/v1/responses", "/v1/score", "/v1/rerank"
MESSAGES = [{"role": "user", "content": "Name one river."}]
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "The river is called"},
    EMBEDDINGS: {"input": "river"},
    RESPONSES: {"input": "Name one lake."},
    SCORE: {"text_1": "river", "text_2": "lake"},
    RERANK: {"query": "river", "documents": ["lake"]},
}


def line(url: str = CHAT, /, custom_id: object = "r-1", *, beside: dict[str, Any] | None = None, **body: Any) -> bytes:
    """Return a line with the least body of its endpoint, changed by ``body``; ``...`` leaves a member out."""
    members = {name: value for name, value in {**MINIMAL[url], **body}.items() if value is not ...}
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": members, **(beside or {})}
    return json.dumps(request, ensure_ascii=False).encode()
