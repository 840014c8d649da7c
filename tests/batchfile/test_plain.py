"""The short cut never says anything but what the long way says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile import Checker, Row, Rules
from airflow_vllm_batch.batchfile.body import endpoints, parameter_table
from airflow_vllm_batch.batchfile.plain import PlainReader
from tests.batchfile.batch_lines import CHAT, COMPLETIONS, EMBEDDINGS, line

URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
RULES = Rules(served_names=frozenset({"m"}))
READERS = {url: PlainReader(endpoint, RULES.served_names) for url, endpoint in endpoints(RULES).items() if url in URLS}

NAMES = st.sampled_from(sorted({name for url in URLS for name in parameter_table()[url]} | {"top_P", "x"}))
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 0.5, -2.5, 1e300, 2**63, -(2**70), 256.0, "", "1", "x", "m", [], [1], ["x"], {}]
)
TEXTS = st.text(st.sampled_from('ab"\\\n{}: é\u2028😀'), max_size=8)
BODIES = st.dictionaries(NAMES, VALUES, max_size=4)


def agree(url: str, raw: bytes) -> None:
    short = READERS[url].read(1, raw)
    full = Checker(RULES).check(1, raw)
    if short is not None:
        assert short == full


@given(url=st.sampled_from(URLS), body=BODIES, custom_id=TEXTS, text=TEXTS, ascii_only=st.booleans())
def test_whole_lines(url: str, body: dict[str, Any], custom_id: str, text: str, *, ascii_only: bool) -> None:
    request = json.loads(line(url, custom_id, **body))
    if url == CHAT and "messages" not in body:
        request["body"]["messages"] = [{"role": "user", "content": text}]
    agree(url, json.dumps(request, ensure_ascii=ascii_only).encode())


FRAGMENTS = st.sampled_from(
    [
        b'"max_tokens": 5, ',
        b'"max_tokens": 5, "max_tokens": 6, ',
        b'"x": "", ',
        b'"x": [[[[]]]], ',
        b'"m\\u006fdel": "m", ',
        b'"user": "u", ',
        b'"temperature": 1e400, ',
        b'"temperature": 1e-400, ',
        b'"seed": ' + b"9" * 30 + b", ",
        b'"stream": false, ',
        b'"model": "\\u0022\\u0022\\u0022", "model": "m", ',
        b'"model" : null , ',
        b'"": 1, ',
    ]
)


@given(url=st.sampled_from(URLS), fragments=st.lists(FRAGMENTS, max_size=3), place=st.booleans())
def test_duplicates_and_odd_members(url: str, fragments: list[bytes], *, place: bool) -> None:
    raw = line(url, "a\\u0022b")
    mark = b'"body": {' if place else b"{"
    agree(url, raw.replace(mark, mark + b"".join(fragments), 1))


@given(
    url=st.sampled_from(URLS),
    at=st.integers(0, 400),
    drop=st.integers(0, 3),
    new=st.sampled_from(list(b'"\\{}[],: u0a\x00\xff')),
)
def test_lines_with_a_few_bytes_changed(url: str, at: int, drop: int, new: int) -> None:
    raw = line(url, 'a"b', model="m", max_tokens=8)
    at %= len(raw)
    agree(url, raw[:at] + bytes([new]) + raw[at + drop :])


@pytest.mark.parametrize("url", URLS)
def test_plain_rows_take_the_short_cut(url: str) -> None:
    for raw in (line(url), line(url, model="m"), line(url, 'with "quotes"\n'), line(url, user=..., model=None)):
        assert isinstance(READERS[url].read(1, raw), Row)
    assert isinstance(READERS[CHAT].read(1, line(max_tokens=8, temperature=0, ignore_eos=True)), Row)


@pytest.mark.parametrize(
    "raw",
    [
        line(max_tokens=0),
        line(temperature=-1),
        line(n=1.5),
        line(model="other"),
        line(stream=True),
        line(top_P=1),
        line(messages=[]),
        line(messages=[{"role": "user", "content": "x", "name": 5}]),
        line(custom_id=" "),
        line(tool_choice="auto"),
        line(beside={"temperature": 0}),
        line().replace(b'"POST"', b'"GET"'),
        b"{" + b'"custom_id": "b", ' + line()[1:],
    ],
)
def test_a_bad_row_never_takes_it(raw: bytes) -> None:
    assert READERS[CHAT].read(1, raw) is None


def test_no_more_than_two_hundred_levels_even_where_they_would_be_dropped() -> None:
    assert READERS[CHAT].read(1, line(x=json.loads("[" * 250 + "]" * 250))) is None
    assert (
        READERS[CHAT].read(1, line().replace(b'"messages"', b'"x": ' + b"[" * 9000 + b"]" * 9000 + b', "messages"'))
        is None
    )
