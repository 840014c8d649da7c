from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile import Line, LineSplitter

LINE_BYTES = st.binary(max_size=12) | st.lists(st.sampled_from([b"a", b"\r", b"\n", b" "]), max_size=12).map(b"".join)


def split(chunks: Iterable[bytes], max_row_bytes: int = 1000) -> list[Line]:
    splitter = LineSplitter(max_row_bytes)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return [*lines, *splitter.finish()]


def cut(content: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[start:end] for start, end in pairwise(bounds)]


def test_lines_end_with_line_feed_only() -> None:
    content = "a\rb\u2028c\u2029d\u0085e\vf\fg\x1ch\x1di\x1ej\nk".encode()
    assert [line.raw for line in split([content])] == content.split(b"\n")


def test_one_carriage_return_before_line_feed_belongs_to_the_line_end() -> None:
    assert [line.raw for line in split([b"a\r\nb\r\r\n\r\nc\r"])] == [b"a", b"b\r", b"", b"c\r"]


def test_numbers_and_offsets_are_physical() -> None:
    lines = split([b"\n\r\nab\r\n", b"c\n\nlast"])
    assert [(line.number, line.offset, line.size) for line in lines] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 3, 2),
        (4, 7, 1),
        (5, 9, 0),
        (6, 10, 4),
    ]


@pytest.mark.parametrize(("content", "count"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\nb", 2)])
def test_a_last_line_without_line_feed_counts(content: bytes, count: int) -> None:
    assert len(split([content])) == count


@given(content=st.lists(LINE_BYTES, max_size=8).map(b"\n".join), places=st.lists(st.integers(0, 200), max_size=6))
def test_any_chunking_gives_the_same_lines(content: bytes, places: list[int]) -> None:
    for limit in (3, 1000):
        assert split(cut(content, places), limit) == split([content], limit)


@given(content=st.lists(LINE_BYTES, max_size=8).map(b"\n".join))
def test_offset_and_size_find_the_line_in_the_stream(content: bytes) -> None:
    for line in split([content]):
        assert content[line.offset : line.offset + line.size] == line.raw


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 4096])
def test_a_line_that_is_too_long_is_counted_and_measured_but_not_kept(chunk_size: int) -> None:
    content = b"a" * 10 + b"\r\n" + b"b" * 11 + b"\n" + b"c\n" + b"d" * 50
    chunks = [content[start : start + chunk_size] for start in range(0, len(content), chunk_size)]
    lines = split(chunks, max_row_bytes=10)
    assert [(line.number, line.size, line.raw) for line in lines] == [
        (1, 10, b"a" * 10),
        (2, 11, None),
        (3, 1, b"c"),
        (4, 50, None),
    ]


def test_an_endless_line_takes_no_memory() -> None:
    splitter, chunk = LineSplitter(100_000), b"x" * 65_536
    tracemalloc.start()
    for _ in range(1000):
        assert list(splitter.feed(chunk)) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.size for line in splitter.finish()] == [65_536_000]
    assert peak < 400_000
