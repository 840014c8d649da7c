"""The end of everything that this process and the engine's processes print, kept for the attempt's record.

File descriptors 1 and 2 become a pipe, since engine processes inherit them and print past Python. What comes through
goes on to where it would have gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Self

TAIL_BYTES = 1 << 20
_CHUNK = 1 << 16


class LogTail:
    """Use as a context manager; :attr:`terminal` is where to print past the pipe."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._seen = 0
        self._lock = threading.Lock()  # chunks and their size belong together
        self._saved: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    @property
    def terminal(self) -> int:
        """File descriptor of the original standard error."""
        return self._saved[1] if self._saved else 2

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        # Engine chatter belongs to the log: standard output is for results alone.
        os.dup2(writer, 1)
        os.close(writer)
        self._thread = threading.Thread(target=self._pump, args=(reader, self._saved[1]), name="log-tail", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._saved is None or self._thread is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(self._saved[0], 1)
        os.dup2(self._saved[1], 2)
        # Engine processes that still live keep the pipe open: what they print later is not waited for.
        self._thread.join(timeout=1.0)
        self._saved = None

    def position(self) -> int:
        """Return how many bytes have come through so far."""
        return self._seen

    def since(self, position: int) -> str:
        """Return what came through since a position, as far as it is still kept."""
        with self._lock:
            raw = b"".join(self._chunks)
            fresh = self._seen - position
        return raw[-fresh:].decode("utf-8", "replace") if fresh > 0 else ""

    def text(self, secrets: Iterable[str] = ()) -> str:
        """Return the tail, at most 1 MiB, with secrets masked."""
        with self._lock:
            raw = b"".join(self._chunks)
        text = raw[-TAIL_BYTES:].decode("utf-8", "replace")
        for secret in secrets:
            if secret:
                text = text.replace(secret, "***")
        return text

    def _pump(self, reader: int, onwards: int) -> None:
        while chunk := os.read(reader, _CHUNK):
            with self._lock:
                self._chunks.append(chunk)
                self._size += len(chunk)
                self._seen += len(chunk)
                while self._size - len(self._chunks[0]) > TAIL_BYTES:
                    self._size -= len(self._chunks.popleft())
            with contextlib.suppress(OSError):
                os.write(onwards, chunk)
        os.close(reader)
