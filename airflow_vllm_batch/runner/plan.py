"""Which rows there are and which are left, in compact arrays: at most about 40 bytes a row, whatever its size.

A row is known by its index: its place among all rows of all inputs, in input order. Its text stays in the spool.
"""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from airflow_vllm_batch.batchfile.lines import BYTE_ORDER_MARK
from airflow_vllm_batch.runner.results import Job

_NOWHERE = (1 << 64) - 1


class _Envelope(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


_decode_envelope = msgspec.json.Decoder(_Envelope).decode


class RowKey(NamedTuple):
    """The key of a row in every try: index of its input, and physical line in it."""

    input: int
    line: int


class Plan:
    """The rows of a run. Filled once by ``add``, then read; results are recorded as they come.

    :param spool: the decompressed inputs, one after the other.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = os.open(spool, os.O_RDONLY)
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._lines = array("I")
        self._results = array("Q")
        self._first_of_input: list[int] = []

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def inputs(self) -> int:
        return len(self._first_of_input)

    def begin_input(self) -> None:
        """Rows that are added from now on belong to the next input."""
        self._first_of_input.append(len(self))

    def add(self, line: int, offset: int, size: int) -> int:
        """Add a row by its place in the spool and return its index."""
        self._lines.append(line)
        self._offsets.append(offset)
        self._sizes.append(size)
        self._results.append(_NOWHERE)
        return len(self._lines) - 1

    def key(self, index: int) -> RowKey:
        return RowKey(bisect.bisect_right(self._first_of_input, index) - 1, self._lines[index])

    def find(self, key: RowKey) -> int | None:
        """Return the index of a row, null where the input has no such row."""
        if not 0 <= key.input < self.inputs:
            return None
        start = self._first_of_input[key.input]
        end = self._first_of_input[key.input + 1] if key.input + 1 < self.inputs else len(self)
        index = bisect.bisect_left(self._lines, key.line, start, end)
        return index if index < end and self._lines[index] == key.line else None

    def job(self, index: int) -> Job:
        """Read a row that passed the checks back from the spool, its body byte for byte."""
        raw = os.pread(self._spool, self._sizes[index], self._offsets[index])
        envelope = _decode_envelope(raw.removeprefix(BYTE_ORDER_MARK))
        return Job(index, envelope.custom_id, envelope.url, bytes(envelope.body))

    def record(self, index: int, offset: int) -> None:
        """Note where the result of a row lies in the result file."""
        self._results[index] = offset

    def result(self, index: int) -> int | None:
        """Return where the result of a row lies, null where it has none."""
        offset = self._results[index]
        return None if offset == _NOWHERE else offset

    def left(self) -> Iterator[int]:
        """Yield the rows without a result, in input order. A result may be recorded meanwhile."""
        for index, offset in enumerate(self._results):
            if offset == _NOWHERE:
                yield index

    def count_left(self) -> int:
        return self._results.count(_NOWHERE)

    def close(self) -> None:
        os.close(self._spool)
