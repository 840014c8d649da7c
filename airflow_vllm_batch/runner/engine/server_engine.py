"""Any OpenAI-compatible server, over HTTP. Knows nothing of vLLM's internals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from airflow_vllm_batch.runner.engine.base import (
    ENDPOINTS,
    ConnectionLostError,
    EngineInfo,
    EngineStats,
    Refusal,
    Reply,
)
from airflow_vllm_batch.runner.errors import EngineDownError, EngineStartError, ServerRefusesError

DEFAULT_WINDOW = 256
CONNECT_SECONDS = 30.0
START_TRIES = 5
RETURN_TRIES = 300
"""Ten minutes: as long as a server may take to load its model again."""
PAUSE_SECONDS = 2.0


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = msgspec.field(default_factory=list)


class _ModelField(msgspec.Struct):
    model: str | None = None


_decode_models = msgspec.json.Decoder(_Models).decode
_decode_model_field = msgspec.json.Decoder(_ModelField).decode


class ServerEngine:
    """The engine behind ``--server-url``.

    :param url: of the server, with or without a final ``/v1``.
    :param model: what rows without a model ask for; must be one that the server serves.
    :param headers: asked for at every request, so that a renewed key is used; holds the API key.
    """

    def __init__(
        self,
        url: str,
        model: str,
        headers: Callable[[], Mapping[str, str]],
        *,
        start_tries: int = START_TRIES,
        return_tries: int = RETURN_TRIES,
        pause: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = headers
        self._start_tries = start_tries
        self._pause = pause
        self._return_tries = return_tries
        self._unreachable: str | None = None
        self._session: aiohttp.ClientSession | None = None
        self._named = b'{"model":%s,' % msgspec.json.encode(model)

    async def start(self) -> EngineInfo:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            # The window bounds the connections; a second bound here would only hide rows in a queue.
            connector=aiohttp.TCPConnector(limit=0),
            trust_env=True,
        )
        models = await self._ask_models(self._session, self._start_tries)
        served = {model.id: model for model in models.data}
        if served and self._model not in served:
            raise EngineStartError(
                f"the server at {self._url} does not serve the model {self._model!r}; "
                f"it serves {', '.join(sorted(served)[:20])}",
                passing=False,
            )
        found = served.get(self._model)
        return EngineInfo(
            served_names=(self._model, *sorted(name for name in served if name != self._model)),
            # What a server can't answer it refuses row by row: there is no standard way to ask beforehand.
            endpoints=frozenset(ENDPOINTS),
            max_model_len=found.max_model_len if found else None,
            max_num_seqs=DEFAULT_WINDOW,
            values={"engine": "server", "server_url": self._url},
        )

    async def _ask_models(self, session: aiohttp.ClientSession, tries: int) -> _Models:
        url = f"{self._url}/v1/models"
        problem = ""
        for tried in range(1, tries + 1):
            try:
                async with session.get(
                    url, headers=self._headers(), timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)
                ) as response:
                    raw = await response.read()
                    status = response.status
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if status in {401, 403}:
                    raise EngineStartError(
                        f"{url} refuses us with status {status}: check the API key of the server", passing=False
                    )
                if status == 404:
                    # No list of models is no fault: some servers have none.
                    return _Models()
                if status < 300:
                    try:
                        return _decode_models(raw)
                    except msgspec.MsgspecError as error:
                        raise EngineStartError(
                            f"{url} answers, but not as an OpenAI-compatible server does ({error})", passing=False
                        ) from error
                problem = f"status {status}"
            if tried < tries:
                await self._pause(PAUSE_SECONDS)
        raise EngineStartError(f"the server can't be reached: {url}: {problem}", passing=True)

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        return None

    async def send(self, endpoint: str, body: bytes) -> Reply:
        if self._session is None:
            raise ConnectionLostError("the engine was not started")
        try:
            async with self._session.post(
                self._url + endpoint,
                data=self._with_model(body),
                headers={**self._headers(), "Content-Type": "application/json"},
            ) as response:
                raw = await response.read()
        except aiohttp.ClientConnectorError as error:
            # Nobody listens: every other row would fail the same way, so this is no row's failure.
            self._unreachable = f"{self._url} can't be reached: {error}"
            raise EngineDownError(self._unreachable) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise  # the row's own deadline
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error
        if response.status in {401, 403}:
            raise ServerRefusesError(
                f"the server at {self._url} refuses us with status {response.status}: check the API key of the server"
            )
        return Reply(
            response.status,
            raw,
            request_id=response.headers.get("x-request-id"),
            retry_after_seconds=_retry_after(response.headers.get("Retry-After")),
        )

    def _with_model(self, body: bytes) -> bytes:
        """Name the model where the row does not: servers other than vLLM insist on it."""
        if _decode_model_field(body).model is not None:
            return body
        rest = body.lstrip()[1:]
        if b'"model"' in body:
            # "model": null: the last of two members counts nowhere in a defined way, so the body is written anew.
            fields = msgspec.json.decode(body)
            return msgspec.json.encode({**fields, "model": self._model})
        return self._named + rest if rest.lstrip() != b"}" else self._named[:-1] + b"}"

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def down(self) -> bool:
        return self._unreachable is not None

    def progress_mark(self) -> int | None:
        return None

    def give_up(self, reason: str) -> None:
        return None

    async def restart(self) -> None:
        """Wait until the server is there again: whoever runs it restarts it."""
        if self._session is not None:
            await self._ask_models(self._session, self._return_tries)
        self._unreachable = None

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date (RFC 9110 section 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
