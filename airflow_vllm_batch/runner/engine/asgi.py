"""Ask an ASGI application in this process for one answer, without a socket. Knows no application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from airflow_vllm_batch.runner.engine.base import Reply


async def post(app: Any, path: str, body: bytes) -> Reply:
    """Ask an ASGI application for one POST.

    Source: https://asgi.readthedocs.io/en/latest/specs/www.html
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
    given = False
    status = 500
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            # An application may watch for a client that leaves; ours never does, it cancels.
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:  # noqa: BLE001  it is in the reply
        # Starlette raises an exception again after the handler answered it with a 500; the answer is the reply.
        if not parts:
            parts.append(json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode())
    request_id = headers.get(b"x-request-id")
    return Reply(status, b"".join(parts), request_id=request_id.decode() if request_id else None)
