from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile.json_text import JsonFaultError, custom_id_of_broken, parse, path_at


def fault(raw: bytes) -> str:
    with pytest.raises(JsonFaultError) as caught:
        parse(raw)
    return f"{caught.value.fault.code}: {caught.value.fault.message}"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": {"b": [1, NaN]}}', "invalid_json: not valid JSON at byte 17 in a.b[1]: NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": True}', "True is Python, not JSON"),
        (b'{"a": [{"b": 1e400}]}', "invalid_json: a[0].b is a number that no double can hold"),
        (b'{"a": -1e999999999999}', "a is a number that no double can hold"),
        (b'{"a": ' + b"9" * 310 + b".0}", "a is a number that no double can hold"),
        (b'{"a": ' + b"1" * 4301 + b"}", "an integer of more than 4,300 digits"),
        (b'{"a": 1, "\\u0061": 2}', "in a: this member appears twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "in a[0].b: this member appears twice"),
        (b'{"a": "\\ud83d"}', "in a: a lone surrogate escape"),
        (b'{"a": "x\\udc00"}', "in a: a lone surrogate escape"),
        (b'{"\\udc00": 1}', "a lone surrogate escape"),
        (b'{"a": "\xe9"}', "invalid_encoding: not valid UTF-8 at byte 8 in a: 0xE9"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_encoding: not valid UTF-8 at byte 8"),
        (b'{"a": "\xc0\x80"}', "invalid_encoding"),
        (b'{"a": "\x0b"}', "a raw control character 0x0B inside a string; write it as \\u000b"),
        (b'{"a": 1}{"b": 2}', "at byte 9: more than one JSON value on the line"),
        (b'{"a": 1},', "at byte 9: text after the request, such as a comma"),
        (b'{"a": 1,}', "trailing comma"),
        (b"{'a': 1}", "single or typographic quotes"),
        (b'"{""a"": 1}"', "quoted as in a CSV file"),
        (b"<html>", "this looks like HTML or XML"),
        (b"# x", "a comment; JSON has none"),
        (b"[", "this looks like a JSON array over several lines"),
        (b'{"a": "b', "the line ends too early"),
        (b"\x00\x00", "a NUL byte"),
        (b"\xc2\xa0{}", "not valid JSON at byte 1"),
        (b'{"a": 01}', "invalid number"),
    ],
)
def test_a_fault_says_where_and_why(raw: bytes, message: str) -> None:
    assert message in fault(raw)


def nested(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_two_hundred_levels_pass_and_one_more_does_not(opening: str, closing: str) -> None:
    assert parse(nested(64, opening, closing))
    assert parse(nested(200, opening, closing))
    assert "nested more than 200 levels deep" in fault(nested(201, opening, closing))
    assert "nested more than 200 levels deep" in fault(nested(20_000, opening, closing))


def test_the_levels_count_in_long_lists_too() -> None:
    filled = [0] * 20
    value: Any = 1
    for _ in range(200):
        value = [*filled, value]
    assert parse(json.dumps(value).encode())
    assert "200 levels" in fault(json.dumps([*filled, value]).encode())


def test_integers_are_exact() -> None:
    number = int("9" * 4300)
    assert parse(b'{"a": ' + b"9" * 4300 + b', "b": -9223372036854775809}') == {"a": number, "b": -(2**63) - 1}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.recursive(LEAVES | TEXT, lambda inner: st.lists(inner, max_size=12) | st.dictionaries(TEXT, inner)))
def test_what_python_writes_is_read_back(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=60) | st.text('{}[],:"\\a1 ', max_size=60).map(str.encode), st.integers(-5, 80))
def test_any_bytes_give_a_value_or_a_fault(raw: bytes, offset: int) -> None:
    try:
        json.loads(raw.decode(), parse_constant=lambda name: pytest.fail(name) if parse(raw) else None)
        parse(raw)
    except (ValueError, JsonFaultError):
        pass
    path = path_at(raw, offset)
    assert path is None or path.isprintable()
    custom_id_of_broken(raw)


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [
        (b'{"custom_id": "a", "body": NaN}', "a"),
        (b'{"custom_id": "a", "x": {"custom_id": "b"}, "body": NaN}', "a"),
        (b'{"custom_id": "a", "x": 1, "x": 2}', "a"),
        (b'{"custom_id": "a", "x": "\xff"}', "a"),
        (b'{"custom_id": "a", "x": "\t"}', "a"),
        (b'{"custom_id": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "a"),
        (b'{"custom_id": "a", "x": ' + b"[" * 5000 + b"}", None),
        (b'{"custom_id": "a", "custom_id": "a", "x": NaN}', None),
        (b'{"custom_id": "\xff", "x": NaN}', None),
        (b'{"custom_id": "\\ud800", "x": NaN}', None),
        (b'{"custom_id": 5, "x": NaN}', None),
        (b'{"custom_id": " ", "x": NaN}', None),
        (b'{"custom_id": "a"', None),
        (b'{"custom_id": "a"}{"custom_id": "b"}', None),
        (b'[{"custom_id": "a", "x": NaN}]', None),
    ],
)
def test_the_id_of_a_broken_line_is_read_where_it_is_certain(raw: bytes, custom_id: str | None) -> None:
    assert custom_id_of_broken(raw) == custom_id
