"""Durable rows: the local file of results, and the immutable objects that hold ranges of it.

A segment is zstd over JSON lines: a header that names its run and the digest of the rest, then one line a row. It is
put whole and never changed, so it is either all there or set aside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard

from airflow_vllm_batch.batchfile.encode import encode
from airflow_vllm_batch.contract import Outcome

MAX_SEGMENT_BYTES = 1 << 30
"""A segment that claims to be larger than this when unpacked is none of ours."""


class BadSegmentError(ValueError):
    """The object is torn or foreign; its rows are not used."""


class SegmentHeader(msgspec.Struct):
    run_key: str
    generation: int
    attempt: int
    spec_digest: str
    rows: int
    blake2b: str
    """Of all bytes after the header's line end, 32 hex digits."""


class StoredRow(msgspec.Struct):
    """A row of a segment, read: ``result`` holds the line for the output files, byte for byte."""

    input: int
    line: int
    custom_id: str | None
    body_digest: str
    spec_digest: str
    outcome: str
    attempts: int
    result: msgspec.Raw
    code: str | None = None
    status_code: int | None = None
    epoch: int = 0


decode_row = msgspec.json.Decoder(StoredRow).decode
_decode_header = msgspec.json.Decoder(SegmentHeader).decode


def body_digest(endpoint: str, body: bytes) -> str:
    """Return what decides, beside the custom_id, whether a row asks the same as before: 32 hex digits."""
    return hashlib.blake2b(body, digest_size=16, key=endpoint.encode()[:64]).hexdigest()


def encode_row(
    *,
    input_index: int,
    line: int,
    custom_id: str | None,
    digest: str,
    spec_digest: str,
    outcome: Outcome,
    attempts: int,
    code: str | None,
    status_code: int | None,
    epoch: int,
    result: bytes,
) -> bytes:
    """Return one segment line with its line end; see :class:`contract.SegmentRow` for the members."""
    return (
        b'{"input":%d,"line":%d,"custom_id":%s,"body_digest":"%s","spec_digest":"%s","outcome":"%s","attempts":%d,'
        b'"code":%s,"status_code":%s,"epoch":%d,"result":%s}\n'
    ) % (
        input_index,
        line,
        b"null" if custom_id is None else encode(custom_id),
        digest.encode(),
        spec_digest.encode(),
        outcome.value.encode(),
        attempts,
        b"null" if code is None else encode(code),
        b"null" if status_code is None else b"%d" % status_code,
        epoch,
        result,
    )


def pack(header: SegmentHeader, rows: bytes) -> bytes:
    """Return the object for a range of rows."""
    head = msgspec.json.encode(header) + b"\n"
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    return compressor.compress(head + rows)


def digest_rows(rows: bytes) -> str:
    return hashlib.blake2b(rows, digest_size=16).hexdigest()


def unpack(packed: bytes) -> tuple[SegmentHeader, bytes]:
    """Return header and rows of an object.

    :raises BadSegmentError: where it is torn, damaged or no segment; the message says which.
    """
    try:
        plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_SEGMENT_BYTES)
    except zstandard.ZstdError as error:
        raise BadSegmentError(f"it can't be unpacked ({error})") from error
    head, separator, rows = plain.partition(b"\n")
    try:
        header = _decode_header(head)
    except msgspec.MsgspecError as error:
        raise BadSegmentError(f"its header is no segment header ({error})") from error
    if not separator or digest_rows(rows) != header.blake2b:
        raise BadSegmentError("its rows are not those its header was written for")
    return header, rows


class Range(NamedTuple):
    """A range of the local result file."""

    start: int
    end: int
    rows: int
    held: bytes | None = None
    """The bytes themselves, where the local disk did not take them."""

    @property
    def size(self) -> int:
        return self.end - self.start

    def joins(self, following: Range, most_bytes: int) -> bool:
        """Whether both can be one range of at most so many bytes."""
        return (
            self.held is None
            and following.held is None
            and self.end == following.start
            and following.end - self.start <= most_bytes
        )


class ResultFile:
    """The local file of results, appended row by row; a row is found again by its offset.

    One writer; ranges that were closed may be read from another thread. The rows of the open range are in memory too,
    so that a disk that is full loses none of them.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._read_fd = os.open(path, os.O_RDONLY)
        # Results of neighbouring rows mostly lie together, so a buffered reader finds most of them in memory.
        self._reader = path.open("rb", buffering=1 << 18)
        self.size = 0
        self._open_start = 0
        self._open_rows = 0
        self._open_lines: list[bytes] = []

    @property
    def open_rows(self) -> int:
        """Rows appended since the last :meth:`close_range`."""
        return self._open_rows

    @property
    def open_bytes(self) -> int:
        return self.size - self._open_start

    def append(self, line: bytes, *, hold: bool = True) -> int:
        """Append a line with its line end and return its offset.

        :param hold: whether it is kept in memory until its range is closed; a row that is not put need not be.
        """
        offset = self.size
        if hold:
            self._open_lines.append(line)
        self._open_rows += 1
        self.size += len(line)
        self._file.write(line)
        return offset

    def close_range(self) -> Range:
        """End the open range and begin the next one; everything in it can be read from now on."""
        self._file.flush()
        closed = Range(self._open_start, self.size, self._open_rows)
        self._begin_range()
        return closed

    def salvage(self) -> Range:
        """End the open range although the disk did not take it; nothing can be appended afterwards."""
        closed = Range(self._open_start, self.size, self._open_rows, b"".join(self._open_lines))
        self._begin_range()
        return closed

    def _begin_range(self) -> None:
        self._open_start, self._open_rows, self._open_lines = self.size, 0, []

    def read(self, closed: Range) -> bytes:
        """Return the bytes of a closed range."""
        return os.pread(self._read_fd, closed.size, closed.start) if closed.held is None else closed.held

    def read_line(self, offset: int) -> bytes:
        """Return the line that begins at an offset, without its line end."""
        if self._reader.tell() != offset:
            self._reader.seek(offset)
        return self._reader.readline()[:-1]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what the disk did not take is not needed any more
            self._file.close()
        os.close(self._read_fd)
        self._reader.close()
