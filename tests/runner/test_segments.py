"""Segments: what was put whole comes back whole, everything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.contract import Outcome, SegmentRow
from airflow_vllm_batch.runner.segments import (
    BadSegmentError,
    ResultFile,
    SegmentHeader,
    body_digest,
    decode_row,
    digest_rows,
    encode_row,
    pack,
    unpack,
)


def header_of(rows: bytes, count: int = 1) -> SegmentHeader:
    return SegmentHeader("run", 1, 1, "spec", count, digest_rows(rows))


def row(
    custom_id: str | None = "a", result: bytes = b'{"id":"vllm-1","custom_id":"a","response":null,"error":null}'
) -> bytes:
    return encode_row(
        input_index=0,
        line=7,
        custom_id=custom_id,
        digest="d",
        spec_digest="s",
        outcome=Outcome.FAILED,
        attempts=2,
        code="timeout",
        status_code=None,
        epoch=3,
        result=result,
    )


@given(st.binary(max_size=2000))
def test_rows_come_back_as_they_were_packed(rows: bytes) -> None:
    assert unpack(pack(header_of(rows), rows)) == (header_of(rows), rows)


@given(st.data())
def test_a_torn_or_altered_segment_is_never_taken_for_a_whole_one(data: st.DataObject) -> None:
    packed = pack(header_of(row()), row())
    place = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        damaged = packed[:place]
    else:
        flipped = packed[place] ^ data.draw(st.integers(1, 255))
        damaged = packed[:place] + bytes([flipped]) + packed[place + 1 :]
    try:
        header, rows = unpack(damaged)
    except BadSegmentError:
        return
    # Some bits of a zstd frame, such as its reserved ones, carry nothing: then nothing may have changed.
    assert (header, rows) == (header_of(row()), row())


@pytest.mark.parametrize("foreign", [b"", b"{}", b"\x28\xb5\x2f\xfd", b"PK\x03\x04 not ours"])
def test_a_foreign_object_is_refused(foreign: bytes) -> None:
    with pytest.raises(BadSegmentError, match="unpacked"):
        unpack(foreign)


def test_a_segment_line_is_what_the_contract_says_it_is() -> None:
    parsed = SegmentRow.model_validate_json(row())
    assert (parsed.input, parsed.line, parsed.custom_id, parsed.attempts) == (0, 7, "a", 2)
    assert (parsed.outcome, parsed.code, parsed.status_code, parsed.epoch) == (Outcome.FAILED, "timeout", None, 3)
    assert parsed.result.id == "vllm-1"
    assert bytes(decode_row(row()).result) == b'{"id":"vllm-1","custom_id":"a","response":null,"error":null}'


@given(st.text())
def test_any_custom_id_survives_in_one_line(custom_id: str) -> None:
    line = row(custom_id)
    assert line.count(b"\n") == 1
    assert decode_row(line).custom_id == custom_id.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_the_digest_of_a_row_tells_bodies_and_endpoints_apart() -> None:
    digests = {
        body_digest("/v1/completions", b'{"prompt":"a"}'),
        body_digest("/v1/completions", b'{"prompt":"b"}'),
        body_digest("/v1/chat/completions", b'{"prompt":"a"}'),
    }
    assert len(digests) == 3
    # Stored in segments: another value would run every row of a run in progress again.
    assert body_digest("/v1/completions", b'{"prompt":"a"}') == "9d7d830f80d1f803b1105c75bc00195c"


def test_a_result_is_found_again_by_its_offset(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results")
    offsets = [results.append(b"%d%s\n" % (number, b"x" * number)) for number in range(100)]
    first = results.close_range()
    results.append(b"last\n")
    second = results.close_range()
    assert [results.read_line(offset) for offset in reversed(offsets)] == [
        b"%d%s" % (number, b"x" * number) for number in reversed(range(100))
    ]
    assert (first.rows, second.rows, results.read(second)) == (100, 1, b"last\n")
    results.close()
