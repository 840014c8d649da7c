"""A way to a server that can be cut and mended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self
from urllib.parse import urlsplit


class TcpProxy:
    """Use as a context manager; :attr:`url` leads to ``target_url`` while it is not cut."""

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname or "", parts.port or 80)
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut = False
        self.url = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> None:
        """Break every connection, and each new one at once."""
        self._do(self._break_all())

    def mend(self) -> None:
        self._cut = False

    def _do(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)  # type: ignore[arg-type]

    async def _break_all(self) -> None:
        self._cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, server_writer}
        await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))
        self._writers -= {writer, server_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
