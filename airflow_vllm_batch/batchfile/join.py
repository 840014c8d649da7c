"""Join request lines with their results. Knows the order of the two files, and nothing of where they lie.

Both files are in input order and every line that is not blank is in exactly one of them, so one pass over the three
streams is enough, whatever their size.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, NamedTuple

import msgspec

from airflow_vllm_batch.batchfile.json_text import JsonFaultError, custom_id_of_broken, is_usable_id, parse
from airflow_vllm_batch.batchfile.lines import BYTE_ORDER_MARK, Line, LineSplitter, is_blank

MAX_LINE_BYTES = 1 << 40
"""A longer line was a bad row; its text is of no use to anybody."""


class Joined(NamedTuple):
    """One row: what was asked, and what came of it."""

    line: int
    """Physical line of the request."""
    request: bytes
    """The request's line as it stands in the input, without its line end."""
    result: bytes
    """The result's line, without its line end."""
    succeeded: bool
    """The result has no error."""


class MismatchError(ValueError):
    """The files do not belong together: the input was replaced since the run, or one of them is not whole."""


class _ResultId(msgspec.Struct):
    custom_id: str | None = None
    error: Any = None


_decode_result = msgspec.json.Decoder(_ResultId).decode


async def split_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[Line]:
    """Yield the lines of a stream that are not blank."""
    splitter = LineSplitter(MAX_LINE_BYTES)
    async for chunk in chunks:
        for line in splitter.feed(chunk):
            if line.raw is not None and not is_blank(line.raw):
                yield line
    for line in splitter.finish():
        if line.raw is not None and not is_blank(line.raw):
            yield line


async def join(
    requests: AsyncIterable[bytes], succeeded: AsyncIterable[bytes], failed: AsyncIterable[bytes]
) -> AsyncIterator[Joined]:
    """Yield every row with its request, in input order.

    :param requests: the input's bytes, decompressed, cut anywhere; may go on after the last row, as after a trial run.
    :param succeeded: bytes of the output file, or of the one file that holds every row.
    :param failed: bytes of the errors file; nothing for the one-file form.
    :raises MismatchError: where a row has no request.
    """
    good, bad = _Head(split_lines(succeeded)), _Head(split_lines(failed))
    await good.advance()
    await bad.advance()
    async for line in split_lines(requests):
        if good.line is None and bad.line is None:
            return
        raw = (line.raw or b"").removeprefix(BYTE_ORDER_MARK)
        # An id belongs to its first line, and only that one can succeed: where it is the next success, this is it.
        custom_id = custom_id_of(raw)
        head = good if good.line is not None and good.custom_id == custom_id else bad
        if head.line is None or head.custom_id != custom_id:
            raise MismatchError(
                f"line {line.number} of the input (custom_id {custom_id!r}) is not the row that comes next in the "
                "results: the input was replaced since the run"
            )
        yield Joined(line.number, line.raw or b"", head.line, head.succeeded)
        await head.advance()
    if good.line is not None or bad.line is not None:
        raise MismatchError("the results have more rows than the input has lines: the input was replaced since the run")


def custom_id_of(raw: bytes) -> str | None:
    """Return the custom_id that the result of a line has; null where the line has none that could be read."""
    try:
        request = parse(raw)
    except JsonFaultError:
        return custom_id_of_broken(raw)
    custom_id = request.get("custom_id") if isinstance(request, dict) else None
    return custom_id if is_usable_id(custom_id) else None


class _Head:
    """The next row of a file, if there is one."""

    def __init__(self, lines: AsyncIterator[Line]) -> None:
        self._lines = lines
        self.line: bytes | None = None
        self.custom_id: str | None = None
        self.succeeded = False

    async def advance(self) -> None:
        found = await anext(self._lines, None)
        self.line = found.raw if found is not None else None
        if self.line is not None:
            result = _decode_result(self.line)
            self.custom_id, self.succeeded = result.custom_id, result.error is None
