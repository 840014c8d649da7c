from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile import encode, one_line

ANY_TEXT = st.text(st.characters() | st.sampled_from('\ud800\udc00\u2028\u2029\x85\n\r"\\\x0b\x1c'), max_size=20)
PROPER_TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\u2028\u2029\x85\n"\\'), max_size=20)


def values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4))


def is_one_line(text: bytes) -> bool:
    return len(text.decode().splitlines()) == 1 and b"\n" not in text and b"\r" not in text


@given(values(PROPER_TEXT))
def test_values_come_back_the_same_from_one_line(value: Any) -> None:
    text = encode(value)
    assert is_one_line(text)
    assert json.loads(text) == value


@given(values(ANY_TEXT))
def test_encoding_never_fails_on_text(value: Any) -> None:
    text = encode(value)
    assert is_one_line(text)
    json.loads(text)


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert json.loads(encode({"a\udc00": ["x\ud800", 2**70, float("inf")]})) == {"a\ufffd": ["x\ufffd", 2**70, None]}
    assert json.loads(encode("\ud83d\ude00")) == "😀"


def test_a_number_that_json_cannot_hold_becomes_null() -> None:
    assert encode([math.nan, math.inf, -math.inf]) == b"[null,null,null]"


def test_unicode_line_ends_leave_as_escapes() -> None:
    assert encode("a\u2028b\u2029c\u0085d") == b'"a\\u2028b\\u2029c\\u0085d"'


def test_raw_json_inside_a_value_is_copied() -> None:
    reply = one_line(b'{"n": 1.0}')
    assert encode({"body": msgspec.Raw(reply)}) == b'{"body":{"n": 1.0}}'
    assert json.loads(encode({"id": "\ud800", "body": msgspec.Raw(reply)})) == {"id": "\ufffd", "body": {"n": 1.0}}


@given(values(PROPER_TEXT), st.sampled_from([None, 1, "\r\n\t"]))
def test_a_pretty_printed_reply_becomes_one_line(value: Any, indent: int | str | None) -> None:
    text = one_line(json.dumps(value, ensure_ascii=False, indent=indent).encode() + b"\r\n")
    assert is_one_line(text)
    assert json.loads(text) == value


def test_a_reply_keeps_its_numbers_and_escapes() -> None:
    reply = b'{"n":1.0,"big":123456789012345678901234567890,"e":1E5,"s":"caf\\u00e9 \\/ \xc3\xa9"}'
    assert one_line(reply) == reply


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (b'{"a":"\\ud800"}', {"a": "\ufffd"}),
        (b'{"a":"\xff"}', {"a": "\ufffd"}),
        (b'{"a":NaN}', {"a": None}),
        ('"a\u2028b"'.encode(), "a\u2028b"),
    ],
)
def test_a_reply_that_is_almost_json_is_mended(reply: bytes, value: Any) -> None:
    text = one_line(reply)
    assert is_one_line(text)
    assert json.loads(text) == value


@pytest.mark.parametrize("reply", [b"", b"{", b"<html>", b'{"a":"x\ny"}', b"{}{}", b"[" * 100_000, b"\x00"])
def test_what_is_no_json_value_is_refused(reply: bytes) -> None:
    with pytest.raises(ValueError, match="the reply is"):
        one_line(reply)


@given(st.binary(max_size=30) | values(ANY_TEXT).map(lambda value: json.dumps(value).encode()))
def test_any_bytes_become_one_line_or_a_value_error(reply: bytes) -> None:
    try:
        text = one_line(reply)
    except ValueError:
        return
    assert is_one_line(text)
    json.loads(text)
