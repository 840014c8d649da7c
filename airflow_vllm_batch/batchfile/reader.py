"""A whole batch file, from a stream of bytes to rows, in one pass and bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from airflow_vllm_batch.batchfile.checks import Checker
from airflow_vllm_batch.batchfile.lines import LineSplitter
from airflow_vllm_batch.batchfile.rows import BadRow, Row, Rules
from airflow_vllm_batch.contract import ErrorCode

FIRST_FAULTS = 10
"""How many bad rows a message for people lists."""
_HEAD_BYTES = 16

_SIGNATURES: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\x1f\x8b"), "gzip data; decompress it, or name the file .gz"),
    (re.compile(rb"PK(\x03\x04|\x05\x06|\x07\x08)"), "a zip archive (or an office document); unpack it first"),
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "zstd data; decompress it, or name the file .zst"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz data; decompress it first"),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "bzip2 data; decompress it first"),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), "a 7z archive; unpack it first"),
    (re.compile(rb"Rar!\x1a\x07"), "a rar archive; unpack it first"),
    (re.compile(rb"\x04\x22\x4d\x18"), "lz4 data; decompress it first"),
    (re.compile(rb"\xff\x06\x00\x00sNaPpY"), "snappy data; decompress it first"),
    (re.compile(rb"PAR1|PARE"), "a parquet file; export it as JSON lines"),
    (re.compile(rb"ARROW1|\xff\xff\xff\xff"), "an arrow file; export it as JSON lines"),
    (re.compile(rb"Obj\x01"), "an avro file; export it as JSON lines"),
    (re.compile(rb"ORC[\x00-\x1f]"), "an ORC file; export it as JSON lines"),
    (re.compile(rb"SQLite format 3\x00"), "an SQLite database; export it as JSON lines"),
    (re.compile(rb"\x89HDF\r\n"), "an HDF5 file; export it as JSON lines"),
    (re.compile(rb"%PDF-"), "a PDF document"),
    (re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8[79]a"), "an image"),
    (re.compile(rb"\x7fELF"), "a program"),
    (re.compile(rb"\x80[\x02-\x05][\x8a\x8c\x95\(\]\}cX]"), "a Python pickle"),
)
_WIDE_TEXT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff"), "UTF-32"),
    (re.compile(rb"\xff\xfe|\xfe\xff"), "UTF-16"),
    # Without a mark: each character of ASCII text has its zero bytes on the same side.
    (re.compile(rb"([\x09-\x7e]\x00\x00\x00){2}|(\x00\x00\x00[\x09-\x7e]){2}"), "UTF-32"),
    (re.compile(rb"([\x09-\x7e]\x00){2}|(\x00[\x09-\x7e]){2}"), "UTF-16"),
)


class InputRejectedError(Exception):
    """The whole file is refused: it is empty, or not a text file in UTF-8."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(slots=True)
class Tally:
    """What was found in a file. Its size doesn't depend on the file's."""

    lines: int = 0
    """Physical lines, blank ones included."""
    runnable: int = 0
    errors: Counter[ErrorCode] = field(default_factory=Counter)
    """Bad rows of each code."""
    first_faults: list[BadRow] = field(default_factory=list)
    """The first ten bad rows."""
    strict_errors: int = 0
    """Bad rows that make ``strict`` refuse the file."""
    rejected: InputRejectedError | None = None
    """Set by :func:`validate` alone."""

    def add(self, row: Row | BadRow) -> None:
        if isinstance(row, Row):
            self.runnable += 1
            return
        self.errors[row.fault.code] += 1
        self.strict_errors += row.fault.counts_for_strict
        if len(self.first_faults) < FIRST_FAULTS:
            self.first_faults.append(row)

    @property
    def requests(self) -> int:
        """Lines that are not blank."""
        return self.runnable + self.errors.total()

    def refused(self, *, strict: bool) -> bool:
        """Whether nothing of the file may run under the policy."""
        return self.rejected is not None or self.runnable == 0 or (strict and self.strict_errors > 0)

    def refusal_message(self) -> str:
        """Return the text for people: how many bad lines, how many of each kind, the first ten of them."""
        if self.rejected is not None:
            return f"input refused ({self.rejected.code}): {self.rejected.message}"
        bad = self.errors.total()
        if not bad:
            return f"no bad lines in {self.requests:,} requests"
        kinds = ", ".join(f"{code} {count:,}" for code, count in self.errors.most_common())
        listed = [f"  {row.fault.message} [{row.fault.code}]" for row in self.first_faults]
        rest = bad - len(listed)
        if rest:
            listed.append(f"  … and {rest:,} more")
        none = "; no line can run" if not self.runnable else ""
        return "\n".join([f"{bad:,} of {self.requests:,} requests are bad ({kinds}){none}:", *listed])


def scan(chunks: Iterable[bytes], rules: Rules | Checker, tally: Tally | None = None) -> Iterator[Row | BadRow]:
    """Yield the rows of a file in its order; blank lines are counted in the tally and yield nothing.

    :param chunks: the file's bytes, cut anywhere.
    :param rules: or a checker, to read its counts later.
    :param tally: filled on the way; complete once the iterator is exhausted.
    :raises InputRejectedError: before the first row where the file is no text in UTF-8, at its end where it holds
        no request. A file whose every line is bad is not rejected: see :attr:`Tally.runnable`.
    """
    reading = Reading(rules, tally)
    for chunk in chunks:
        yield from reading.feed(chunk)
    yield from reading.finish()


async def ascan(
    chunks: AsyncIterable[bytes], rules: Rules | Checker, tally: Tally | None = None
) -> AsyncIterator[Row | BadRow]:
    """Do as :func:`scan` does, for chunks that have to be waited for."""
    reading = Reading(rules, tally)
    async for chunk in chunks:
        for row in reading.feed(chunk):
            yield row
    for row in reading.finish():
        yield row


def validate(
    chunks: Iterable[bytes], rules: Rules | Checker, on_error: Callable[[BadRow], None] | None = None
) -> Tally:
    """Check a whole file and return what was found; nothing of the file is kept.

    :param on_error: called with each bad row, in order.
    """
    tally = Tally()
    try:
        for row in scan(chunks, rules, tally):
            if on_error is not None and isinstance(row, BadRow):
                on_error(row)
    except InputRejectedError as error:
        tally.rejected = error
    return tally


class Reading:
    """The state of one pass, which :func:`scan`, :func:`ascan` and the runner's intake share.

    :attr:`offset` and :attr:`size` tell where in the stream the row lies that was yielded last, in bytes.
    """

    def __init__(self, rules: Rules | Checker, tally: Tally | None) -> None:
        self._checker = rules if isinstance(rules, Checker) else Checker(rules)
        self._tally = Tally() if tally is None else tally
        self._splitter = LineSplitter(self._checker.rules.max_row_bytes)
        self._head: bytes | None = b""
        """The first bytes while they are too few to judge, then None."""
        self._requests_before = self._tally.requests
        self.offset = 0
        self.size = 0

    def feed(self, chunk: bytes) -> Iterator[Row | BadRow]:
        """Return the rows of the lines that end in this chunk. To be exhausted before the next call."""
        if self._head is not None:
            chunk = self._head + chunk
            if len(chunk) < _HEAD_BYTES:
                self._head = chunk
                return iter(())
            self._open(chunk)
        return self._rows(chunk)

    def finish(self) -> Iterator[Row | BadRow]:
        """Yield what is left at the end of the stream.

        :raises InputRejectedError: at its end, where the stream held no request.
        """
        if self._head:
            head = self._head
            self._open(head)
            yield from self._rows(head)
        yield from self._rows(None)
        if self._tally.requests == self._requests_before:
            raise InputRejectedError(ErrorCode.EMPTY_FILE, "there is no request in the input")

    def _open(self, head: bytes) -> None:
        self._head = None
        refuse_other_formats(head)

    def _rows(self, chunk: bytes | None) -> Iterator[Row | BadRow]:
        check, tally = self._checker.check, self._tally
        for line in self._splitter.finish() if chunk is None else self._splitter.feed(chunk):
            tally.lines += 1
            raw = line.raw
            row = check(line.number, raw) if raw is not None else self._checker.too_long(line.number, line.size)
            if row is None:
                continue
            self.offset, self.size = line.offset, line.size
            if type(row) is Row:
                tally.runnable += 1
            else:
                tally.add(row)
            yield row


def refuse_other_formats(head: bytes) -> None:
    """Refuse a file by its first bytes; sixteen are enough.

    :raises InputRejectedError: where it is compressed, binary, or text of another width.
    """
    for pattern, encoding in _WIDE_TEXT:
        if pattern.match(head):
            message = f"the input looks like {encoding}; save it as UTF-8"
            raise InputRejectedError(ErrorCode.INVALID_ENCODING, message)
    for pattern, what in _SIGNATURES:
        if pattern.match(head):
            raise InputRejectedError(ErrorCode.UNSUPPORTED_FILE, f"the input is not JSON lines but {what}")
