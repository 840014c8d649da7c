"""Decompress and compress in bounded memory: ``.gz`` with several members, ``.zst`` with several frames.

Checks every checksum the stream has; a truncated or damaged stream is an error, never a shorter file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import zstandard

CHUNK_BYTES = 1024 * 1024
MAX_WINDOW_BYTES = 128 * 1024 * 1024
"""The largest window a zstd frame may ask for, as ``zstd --long=27`` and ``--ultra -22`` do."""
_ZSTD_FEED_BYTES = 1024
"""zstandard returns all that a piece of input expands to: of these bytes, no more than 32 MiB."""
_GZIP_WBITS = 31
LEVEL = 3

SUFFIXES = (".gz", ".zst")


class CorruptStreamError(ValueError):
    """A compressed stream is truncated or damaged; the message says near which of its bytes."""


class ZstdWriter(Protocol):
    def write(self, data: bytes, /) -> int: ...


def decompress(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """Return the bytes of a stream as its file name tells: decompressed for ``.gz`` and ``.zst``, else as they are.

    The chunks of a compressed stream have at most 1 MiB.

    :raises CorruptStreamError: while reading, where the stream is truncated or damaged, or asks for too much memory.
    """
    match Path(name.lower()).suffix:
        case ".gz":
            return _gunzip(chunks, name)
        case ".zst":
            return _unzstd(chunks, name)
        case _:
            return chunks


async def _gunzip(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    member = zlib.decompressobj(wbits=_GZIP_WBITS)
    begun = members = 0
    offset = 0
    async for chunk in chunks:
        data = chunk
        while data:
            if member.eof or not begun:
                # Between members; zero bytes pad the last one, as tapes and some tools leave them.
                if members and not (data := data.lstrip(b"\0")):
                    break
                member, begun = zlib.decompressobj(wbits=_GZIP_WBITS), 1
            try:
                out = member.decompress(data, CHUNK_BYTES)
            except zlib.error as error:
                raise CorruptStreamError(f"{name} is damaged near byte {offset} of the gzip stream: {error}") from error
            rest = member.unused_data if member.eof else member.unconsumed_tail
            offset += len(data) - len(rest)
            members += member.eof
            if out:
                yield out
            elif len(rest) == len(data):
                break
            data = rest
    if not begun or not member.eof:
        raise CorruptStreamError(f"{name} is truncated: the gzip stream stops after {offset} bytes")


async def _unzstd(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    begun, offset = False, 0
    async for chunk in chunks:
        ready = bytearray()
        for start in range(0, len(chunk), _ZSTD_FEED_BYTES):
            data = chunk[start : start + _ZSTD_FEED_BYTES]
            while data:
                if frame.eof:
                    frame = decompressor.decompressobj()
                try:
                    ready += frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise CorruptStreamError(
                        f"{name} is damaged near byte {offset} of the zstd stream: {error}"
                    ) from error
                begun = True
                rest = frame.unused_data if frame.eof else b""
                offset += len(data) - len(rest)
                data = rest
            while len(ready) >= CHUNK_BYTES:
                yield bytes(ready[:CHUNK_BYTES])
                del ready[:CHUNK_BYTES]
        if ready:
            yield bytes(ready)
    if not begun or not frame.eof:
        raise CorruptStreamError(f"{name} is truncated: the zstd stream stops after {offset} bytes")


def compress(data: bytes) -> bytes:
    """Return one zstd frame with a checksum."""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)


def decompress_small(data: bytes, *, name: str, limit_bytes: int) -> bytes:
    """Return what a whole small zstd object holds.

    :param name: what to call it in a message.
    :raises CorruptStreamError: where it is truncated, damaged or holds more than ``limit_bytes``.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    out, rest = bytearray(), data
    try:
        while rest or not out:
            frame = decompressor.decompressobj()
            for start in range(0, len(rest), _ZSTD_FEED_BYTES):
                out += frame.decompress(rest[start : start + _ZSTD_FEED_BYTES])
                if len(out) > limit_bytes:
                    raise CorruptStreamError(f"{name} holds more than {limit_bytes} bytes")
                if frame.eof:
                    rest = frame.unused_data + rest[start + _ZSTD_FEED_BYTES :]
                    break
            if not frame.eof:
                raise CorruptStreamError(f"{name} is truncated: the zstd stream stops after {len(data)} bytes")
            if not rest:
                break
    except zstandard.ZstdError as error:
        raise CorruptStreamError(f"{name} is damaged: {error}") from error
    return bytes(out)


@contextlib.contextmanager
def zstd_file(path: Path) -> Iterator[ZstdWriter]:
    """Write a zstd file in bounded memory: complete and synced at the end, after an error it reads as truncated."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with path.open("wb") as file:
        writer = compressor.stream_writer(file, closefd=False)
        yield writer
        writer.flush(zstandard.FLUSH_FRAME)  # not after an error: what was cut off would look whole
        file.flush()
        os.fsync(file.fileno())


async def compress_to_file(chunks: AsyncIterator[bytes], path: Path) -> int:
    """Write a stream to a zstd file and return how many bytes went in, before compression."""
    total = 0
    with zstd_file(path) as writer:
        async for chunk in chunks:
            total += len(chunk)
            await asyncio.to_thread(writer.write, chunk)
    return total
