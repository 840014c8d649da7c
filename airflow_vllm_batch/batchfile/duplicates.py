"""Which line used an id first, in at most 64 bytes an id whatever its length."""

from __future__ import annotations

import secrets
from struct import Struct

_LINE_BITS = 40
_RECORD = Struct(">qQ")
_KEY_BYTES = 11
_FIRST_BUCKETS = 256
_FULL = 64
"""Records of an average bucket at which the buckets are made more."""
_GROWTH = 16


class IdTable:
    """Buckets of 16-byte records: a 64-bit digest, 24 bits of a second one, and a 40-bit line number.

    A bucket is searched and extended by the interpreter's own byte operations, which a table of single slots isn't.
    Two different ids are taken for the same one with a probability of n²/2⁸⁹ for n ids: 1.6 in 10⁹ for a thousand
    million of them. The digests are SipHash of the UTF-8 text, the long one behind random bytes of this table, so no
    file can be made to collide.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)
        self._used = 0
        self._allocate(_FIRST_BUCKETS)

    def __len__(self) -> int:
        return self._used

    def claim(self, name: str, line: int) -> int | None:
        """Give the id to this line, which is below 2⁴⁰. Return None, or the line that has it already."""
        text = name.encode()
        digest = hash(self._salt + text)
        record = _RECORD.pack(digest, (hash(text) & 0xFFFFFF) << _LINE_BITS | line)
        bucket = self._buckets[digest & self._mask]
        place = bucket.find(record[:_KEY_BYTES])
        while place >= 0:
            # Elsewhere it is the end of one record and the beginning of the next.
            if place % _RECORD.size == 0:
                return int.from_bytes(bucket[place + _KEY_BYTES : place + _RECORD.size], "big")
            place = bucket.find(record[:_KEY_BYTES], place + 1)
        bucket += record
        self._used += 1
        if self._used > self._limit:
            self._grow()
        return None

    def _allocate(self, count: int) -> None:
        self._mask = count - 1
        self._limit = count * _FULL
        self._buckets = [bytearray() for _ in range(count)]

    def _grow(self) -> None:
        old = self._buckets
        self._allocate(len(old) * _GROWTH)
        for number, bucket in enumerate(old):
            for digest, entry in _RECORD.iter_unpack(bucket):
                self._buckets[digest & self._mask] += _RECORD.pack(digest, entry)
            # Each old bucket is let go as soon as it is empty, so that the peak stays low.
            old[number] = bytearray()
