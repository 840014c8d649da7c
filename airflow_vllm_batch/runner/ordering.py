"""Rows with the same prompt prefix next to each other, so that the engine's prefix cache holds what comes next.

The order is a walk of the tree of prefixes: rows are grouped by the first block of their prompt, each group by the
second block, and so on. Groups keep the order in which the input first has them, so an input that is in the best order
already stays as it is. Pure, but for the file in which the digests of blocks lie.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

BLOCK_CHARACTERS = 512
"""Evenly spaced, since sharing may end anywhere: coarser marks, or marks that end before the sharing does, gain nothing
(measured with a system prompt of 4,557 characters and documents of 3,000)."""
LONG_FACTOR = 4
"""A row with so many times the usual max_tokens is long: at the tail it would run alone."""
TAIL_SHARE = 0.1
SMALLEST_GROUP = 3
"""Two rows that stand together can't be brought closer."""
NO_BLOCKS: array[int] = array("Q")
"""Of a prompt that is shorter than a block, or shares nothing."""
_ENDED = 0
"""Stands for the block of a prompt that is no longer than the blocks before."""

_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Prompt(NamedTuple):
    """What decides when a row runs."""

    text: str
    """Begins like the prompt that the engine will see: two rows whose prompts share a beginning have texts that do.

    Model, tools and template arguments come first, then messages in their order; media stand by their reference. Empty
    where order gains nothing: embeddings, scores and reranking read a prompt once, so no prefix of theirs is cached.
    """
    most_tokens: int
    """How many tokens the answer may have; 0 where the row does not say."""


def read_prompt(endpoint: str, body: bytes) -> Prompt:
    """Return the prompt of a row that passed the checks."""
    if endpoint not in _GENERATING:
        return Prompt("", 0)
    request = _decode(body)
    parts: list[str] = [str(request.get("model") or "")]
    if endpoint == "/v1/chat/completions":
        parts += [_text(request.get(name)) for name in ("chat_template_kwargs", "tools")]
        parts += [_message(message) for message in request.get("messages") or ()]
    elif endpoint == "/v1/completions":
        parts.append(_text(request.get("prompt")))
    else:
        parts += [_text(request.get(name)) for name in ("tools", "instructions")]
        given = request.get("input")
        parts += [_message(item) for item in given] if isinstance(given, list) else [_text(given)]
    return Prompt("\n".join(parts), _most_tokens(request))


def _most_tokens(request: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = request.get(name)
        if isinstance(value, int | float) and value > 0:
            return int(value)
    return 0


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return _text(message)
    rest = [_text(message[name]) for name in ("tool_calls", "name") if message.get(name)]
    return f"<{message.get('role')}>{_text(message.get('content'))}{''.join(rest)}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text")) for part in value)
    return _encode(value).decode()


def block_digests(text: str) -> array[int]:
    """Return a 64-bit digest of each whole block of a text."""
    raw = (
        hashlib.blake2b(text[start : start + BLOCK_CHARACTERS].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for start in range(0, len(text) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS)
    )
    return array("Q", b"".join(raw))


class PrefixFile:
    """The digests of every row's blocks, on the local disk: eight bytes for 512 characters of prompt.

    Filled once with :meth:`add` in the plan's order, then :meth:`order` is called once. In memory are twelve bytes a
    row, and about ninety while rows are ordered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=1 << 18)
        self._ends = array("Q")
        self._total = 0
        self._tokens = array("I")

    def add(self, digests: array[int], tokens: int = 0) -> None:
        """Add the next row of the plan; an empty array for one that has no prefix to share."""
        if digests:
            digests.tofile(self._file)
            self._total += len(digests)
        self._ends.append(self._total)
        self._tokens.append(min(tokens, 0xFFFF_FFFF))

    def close(self) -> None:
        self._file.close()

    def order(self, rows: Iterable[int]) -> array[int]:
        """Return rows, given in input order, in the order in which they should run."""
        self._file.flush()
        found = array("I", rows)
        if self._total and len(found) >= SMALLEST_GROUP:
            with (
                self._path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
                view.cast("Q") as blocks,
            ):
                self._group(found, blocks)
        return self._without_long_tail(found)

    def _group(self, rows: array[int], blocks: memoryview) -> None:
        """Group rows in place: ranges whose rows share their first blocks, and are yet to be told apart by the next."""
        todo = [(0, len(rows), 0)]
        while todo:
            start, end, depth = todo.pop()
            while (shared := self._shared(rows, start, end, depth, blocks)) is not None and shared != _ENDED:
                depth += 1
            if shared == _ENDED:
                continue
            self._arrange(rows, start, end, depth, blocks)
            run = start
            for place in range(start + 1, end + 1):
                digest = self._block(rows[run], depth, blocks)
                if place < end and self._block(rows[place], depth, blocks) == digest:
                    continue
                if place - run >= SMALLEST_GROUP and digest != _ENDED:
                    todo.append((run, place, depth + 1))
                run = place

    def _block(self, row: int, depth: int, blocks: memoryview) -> int:
        place = (self._ends[row - 1] if row else 0) + depth
        return int(blocks[place]) if place < self._ends[row] else _ENDED

    def _shared(self, rows: array[int], start: int, end: int, depth: int, blocks: memoryview) -> int | None:
        """Return the block that all rows of a range have at a depth, null where they differ."""
        first = self._block(rows[start], depth, blocks)
        same = all(self._block(rows[place], depth, blocks) == first for place in range(start + 1, end))
        return first if same else None

    def _arrange(self, rows: array[int], start: int, end: int, depth: int, blocks: memoryview) -> None:
        """Bring rows with the same block together; groups in the order of their first row, rows in input order."""
        ranked = sorted(rows[start:end], key=lambda row: self._block(row, depth, blocks))
        # The first row of a run is the one that the input has first, since sorting is stable.
        leaders = array("Q")
        leader, digest = -1, -1
        for row in ranked:
            if (found := self._block(row, depth, blocks)) != digest:
                leader, digest = row, found
            leaders.append(leader << 32 | row)
        del ranked
        rows[start:end] = array("I", (both & 0xFFFF_FFFF for both in sorted(leaders)))

    def _without_long_tail(self, rows: array[int]) -> array[int]:
        """Move rows with a far larger max_tokens than usual from the tail to the front.

        There they would run on alone when all others have ended; at the front they run beside them.
        """
        asked = sorted(self._tokens[row] for row in rows if self._tokens[row])
        if not asked:
            return rows
        long = asked[len(asked) // 2] * LONG_FACTOR
        tail = len(rows) - int(len(rows) * TAIL_SHARE)
        late = array("I", (row for row in rows[tail:] if self._tokens[row] >= long))
        if not late or len(late) > len(rows) * TAIL_SHARE / 2:
            return rows
        return (
            late
            + array("I", (row for row in rows[:tail]))
            + array("I", (row for row in rows[tail:] if self._tokens[row] < long))
        )
