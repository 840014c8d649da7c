"""A small OpenAI-compatible server in a thread: the real protocol, answers by a script, a count of what was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from tests.support.runs import answer

Script = Callable[[dict[str, Any], int], "web.Response | None"]


@dataclass
class OpenAIServer:
    """Use as a context manager.

    :param models: what ``/v1/models`` lists; null for a server without that page.
    :param key: the API key it insists on.
    :param script: gets a request's body and how often the same one came before; null answers it normally.
    """

    models: list[str] | None = field(default_factory=lambda: ["m"])
    key: str | None = None
    script: Script = lambda body, before: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": "wrong key", "code": 401}}, status=401)

    async def _models(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        if self.models is None:
            return web.json_response({"error": {"message": "not here"}}, status=404)
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _chat(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        before = self.requests.count(body)
        self.requests.append(body)
        scripted = self.script(body, before)
        if scripted is not None:
            return scripted
        return web.Response(
            body=answer(body["messages"][-1]["content"].upper()),
            content_type="application/json",
            headers={"x-request-id": f"id-{len(self.requests)}"},
        )

    @property
    def asked(self) -> list[str]:
        """Last messages, in the order in which they came."""
        return [json.loads(json.dumps(body))["messages"][-1]["content"] for body in self.requests]
