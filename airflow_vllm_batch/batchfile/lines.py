"""Bytes to physical lines, in bounded memory. Knows neither JSON nor what a line should hold."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes are looked for by number: for a bytes object, each search makes an exception first.
_CR, _LF = b"\r\n"
_BLANK = b" \t\r"


class Line(msgspec.Struct, frozen=True, gc=False):
    number: int
    """Counted from 1, blank lines included."""
    offset: int
    """Where the line begins in the stream, in bytes."""
    size: int
    """Bytes of the line without its line end."""
    raw: bytes | None
    """The line without its line end; None where it is longer than a row may be."""


def is_blank(raw: bytes) -> bool:
    """Whether a line holds nothing but spaces, tabs, CR and a byte order mark before them."""
    return not raw.removeprefix(BYTE_ORDER_MARK).strip(_BLANK)


class LineSplitter:
    """Cut a stream of chunks at LF, and nowhere else.

    One CR directly before LF belongs to the line end. A last line without LF counts. However the stream is cut into
    chunks, the lines are the same. A line longer than ``max_row_bytes`` is counted and measured but not kept: in
    memory are at most one chunk and ``max_row_bytes``.
    """

    def __init__(self, max_row_bytes: int) -> None:
        self._max_row_bytes = max_row_bytes
        self._number = 0
        self._offset = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._last_byte = b""

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that end in this chunk. Must be exhausted before the next call."""
        start = 0
        if self._size:
            end = chunk.find(_LF)
            if end < 0:
                self._hold(chunk)
                return
            self._hold(chunk[:end])
            start = end + 1
            yield self._close_held(line_feed=True)
        find, limit, number, offset = chunk.find, self._max_row_bytes, self._number, self._offset
        while (end := find(_LF, start)) >= 0:
            raw = chunk[start : end - 1] if end > start and chunk[end - 1] == _CR else chunk[start:end]
            size = len(raw)
            number += 1
            yield Line(number, offset, size, raw if size <= limit else None)
            offset += end + 1 - start
            start = end + 1
        self._number, self._offset = number, offset
        self._hold(chunk[start:])

    def finish(self) -> Iterator[Line]:
        """Yield the last line where the stream did not end with LF."""
        if self._size:
            yield self._close_held(line_feed=False)

    def _hold(self, part: bytes) -> None:
        if not part:
            return
        self._size += len(part)
        self._last_byte = part[-1:]
        # One byte more than a row may have: it is the CR of the line end where LF opens the next chunk.
        if self._size <= self._max_row_bytes + 1:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _close_held(self, *, line_feed: bool) -> Line:
        raw, size, offset = b"".join(self._parts), self._size, self._offset
        self._parts, self._size = [], 0
        self._number += 1
        self._offset += size + line_feed
        if line_feed and self._last_byte == b"\r":
            raw, size = raw[: size - 1], size - 1
        return Line(self._number, offset, size, raw if size <= self._max_row_bytes else None)
