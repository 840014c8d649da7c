"""Whole files: rejection, counts, chunking, memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tracemalloc
import zipfile
from collections.abc import AsyncIterator, Iterator

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile import (
    BadRow,
    Checker,
    InputRejectedError,
    LineSplitter,
    Row,
    Rules,
    Tally,
    ascan,
    encode,
    scan,
    validate,
)
from airflow_vllm_batch.batchfile.lines import is_blank
from airflow_vllm_batch.batchfile.reader import Reading
from tests.batchfile.batch_lines import CHAT, COMPLETIONS, line
from tests.batchfile.test_lines import cut

RULES = Rules(served_names=frozenset({"m"}))
TEXT = b"\n".join([line(custom_id=f"r-{number}") for number in range(20)])


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \t\r\n\n", "empty_file"),
        (b"\xef\xbb\xbf", "empty_file"),
        (b"\xef\xbb\xbf\n\xef\xbb\xbf \n", "empty_file"),
        (gzip.compress(TEXT), "unsupported_file"),
        (zipped(TEXT), "unsupported_file"),
        (zstandard.compress(TEXT), "unsupported_file"),
        (lzma.compress(TEXT), "unsupported_file"),
        (bz2.compress(TEXT), "unsupported_file"),
        (bz2.compress(b""), "unsupported_file"),
        (pickle.dumps([{"a": 1}]), "unsupported_file"),
        (b"PAR1\x15\x04\x15\x10", "unsupported_file"),
        (b"%PDF-1.7\n", "unsupported_file"),
        (b"Obj\x01\x04\x14avro.codec", "unsupported_file"),
        (b"ARROW1\x00\x00", "unsupported_file"),
        (b"SQLite format 3\x00", "unsupported_file"),
        (TEXT.decode().encode("utf-16"), "invalid_encoding"),
        (TEXT.decode().encode("utf-16-le"), "invalid_encoding"),
        (TEXT.decode().encode("utf-16-be"), "invalid_encoding"),
        (TEXT.decode().encode("utf-32"), "invalid_encoding"),
        (TEXT.decode().encode("utf-32-le"), "invalid_encoding"),
        (TEXT.decode().encode("utf-32-be"), "invalid_encoding"),
    ],
)
@pytest.mark.parametrize("chunk_size", [1, 5, 1 << 20])
def test_what_is_no_text_in_utf8_is_rejected(content: bytes, code: str, chunk_size: int) -> None:
    chunks = [content[start : start + chunk_size] for start in range(0, len(content), chunk_size)]
    with pytest.raises(InputRejectedError) as caught:
        list(scan(chunks, RULES))
    assert caught.value.code == code
    assert str(caught.value) == caught.value.message


def test_nul_bytes_alone_do_not_reject_a_file() -> None:
    assert validate([b"\x00\x00\x00\x00\n" + TEXT], RULES).runnable == 20


def test_a_file_of_bad_lines_only_is_not_rejected_but_refused() -> None:
    tally = validate([b"oops\n{}\n"], RULES)
    assert tally.rejected is None
    assert (tally.lines, tally.runnable, tally.requests) == (2, 0, 2)
    assert tally.refused(strict=False)
    assert "no line can run" in tally.refusal_message()


def test_the_tally_counts_physical_lines_and_each_code() -> None:
    content = b"\n".join([line(custom_id="a"), b"", line(custom_id="a"), b"oops", line(custom_id="b", n=0), b" ", b"x"])
    seen: list[BadRow] = []
    tally = validate([content], RULES, seen.append)
    assert (tally.lines, tally.runnable, tally.strict_errors) == (7, 1, 4)
    assert tally.errors == {"duplicate_custom_id": 1, "invalid_json": 2, "invalid_request": 1}
    assert [row.line for row in seen] == [3, 4, 5, 7]
    assert not tally.refused(strict=False)
    assert tally.refused(strict=True)


def test_the_refusal_lists_ten_lines_and_counts_each_kind() -> None:
    content = b"\n".join([b"oops"] * 14 + [line(n=0)] + [line(custom_id=f"q-{number}") for number in range(5)])
    text = validate([content], RULES).refusal_message()
    first, *listed = text.splitlines()
    assert first == "15 of 20 requests are bad (invalid_json 14, invalid_request 1):"
    assert listed[0].startswith("  line 1: not valid JSON at byte 1: expected value")
    assert len(listed) == 11
    assert listed[-1] == "  … and 5 more"


def test_the_refusal_of_a_whole_file_says_why() -> None:
    tally = validate([gzip.compress(TEXT)], RULES)
    assert tally.refused(strict=False)
    assert (tally.runnable, tally.lines) == (0, 0)
    assert tally.refusal_message().startswith("input refused (unsupported_file): the input is not JSON lines but gzip")
    assert validate([TEXT], RULES).refusal_message() == "no bad lines in 20 requests"


def test_a_line_that_is_too_long_is_one_bad_row() -> None:
    content = b"\n".join([line(custom_id="a"), b'{"x": "' + b"x" * 5000, line(custom_id="b")])
    rows = list(scan([content], Rules(max_row_bytes=2000)))
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert "5,007 bytes, 2,000 are allowed" in rows[1].fault.message  # type: ignore[union-attr]


async def test_waiting_for_chunks_changes_nothing() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(TEXT), 100):
            yield TEXT[start : start + 100]

    tally = Tally()
    assert [row async for row in ascan(chunks(), RULES, tally)] == list(scan([TEXT], RULES))
    assert tally.runnable == 20


def test_a_checker_can_be_given_to_read_its_counts_later() -> None:
    checker = Checker(Rules(unknown_parameters="warn"))
    assert len(list(scan([line(foo=1)], checker))) == 1
    assert checker.unknown_parameters == {"foo": 1}


def test_a_second_empty_file_is_rejected_though_the_tally_has_rows() -> None:
    tally = Tally()
    list(scan([TEXT], RULES, tally))
    with pytest.raises(InputRejectedError):
        list(scan([b"\n"], RULES, tally))


def test_the_place_of_the_row_in_the_stream_is_told() -> None:
    content = b"\n" + line(custom_id="a") + b"\r\n\noops\n" + line(custom_id="b")
    reading, found = Reading(RULES, None), []
    for chunk in cut(content, [3, 50, 200]):
        found += [content[reading.offset : reading.offset + reading.size] for _ in reading.feed(chunk)]
    found += [content[reading.offset : reading.offset + reading.size] for _ in reading.finish()]
    assert found == [line(custom_id="a"), b"oops", line(custom_id="b")]


LINES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"", b" ", b"\r", b"\xef\xbb\xbf", b"{}", b"null", b'{"custom_id":"a"}', b"[" * 300, b'"\\ud800"']
    ),
    st.builds(line, st.sampled_from([CHAT, COMPLETIONS]), st.sampled_from("abc"), n=st.integers(0, 2)),
    st.builds(lambda raw, at: raw[: at % len(raw)], st.just(line()), st.integers(0, 500)),
    st.builds(
        lambda raw, at, b: raw[: at % len(raw)] + b + raw[at % len(raw) :],
        st.just(line()),
        st.integers(0, 500),
        st.binary(max_size=2),
    ),
)
FILES = st.lists(LINES, max_size=8).map(b"\n".join)


@given(content=FILES, places=st.lists(st.integers(0, 1000), max_size=5))
def test_every_line_ends_in_one_verdict_however_the_file_is_cut(content: bytes, places: list[int]) -> None:
    def verdicts(chunks: list[bytes]) -> tuple[list[Row | BadRow], Tally]:
        tally, rows = Tally(), list[Row | BadRow]()
        try:
            rows.extend(scan(chunks, RULES, tally))
        except InputRejectedError as error:
            tally.rejected = InputRejectedError(error.code, error.message)
        return rows, tally

    rows, tally = verdicts([content])
    again, tally_again = verdicts(cut(content, places))
    assert rows == again
    assert (tally.lines, tally.errors, str(tally.rejected)) == (
        tally_again.lines,
        tally_again.errors,
        str(tally_again.rejected),
    )
    if tally.rejected is None:
        splitter = LineSplitter(RULES.max_row_bytes)
        filled = [found for found in [*splitter.feed(content), *splitter.finish()] if not is_blank(found.raw or b"")]
        assert [row.line for row in rows] == [found.number for found in filled]
        assert tally.requests == len(rows)
    for row in rows:
        if isinstance(row, BadRow):
            assert row.fault.message.isprintable()
            encode({"custom_id": row.custom_id, "message": row.fault.message}).decode()


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10), min_size=1, max_size=5, unique=True
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
def test_valid_rows_survive_writing_and_reading(ids: list[str], text: str) -> None:
    requests = [
        {
            "custom_id": f"id {custom_id}",
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [{"role": "user", "content": text}], "seed": 2**63 - 1},
        }
        for custom_id in ids
    ]
    rows = list(scan([b"\n".join(map(encode, requests))], RULES))
    assert [row.custom_id for row in rows] == [request["custom_id"] for request in requests]
    for row, request in zip(rows, requests, strict=True):
        assert isinstance(row, Row)
        assert row.body == encode(request["body"])


def test_a_long_file_with_many_faults_takes_bounded_memory() -> None:
    def chunks() -> Iterator[bytes]:
        for start in range(0, 30_000, 100):
            yield b"".join(
                (line(custom_id=f"r-{number}", top_P=1) if number % 10 == 0 else line(custom_id=f"r-{number}")) + b"\n"
                for number in range(start, start + 100)
            )

    tracemalloc.start()
    tally = validate(chunks(), RULES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tally.lines, tally.runnable, tally.errors.total()) == (30_000, 27_000, 3_000)
    assert len(tally.first_faults) == 10
    assert len(tally.refusal_message()) < 3000
    assert peak / 30_000 < 64
