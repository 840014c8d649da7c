"""Requests joined with their results, in one pass."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile.join import Joined, MismatchError, join


async def cut(data: bytes, size: int = 7) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def request(custom_id: str | None) -> bytes:
    return json.dumps({"custom_id": custom_id}).encode() if custom_id is not None else b"{broken"


def result(custom_id: str | None, *, good: bool) -> bytes:
    error = None if good else {"code": "x", "message": "y"}
    return json.dumps({"id": "vllm-1", "custom_id": custom_id, "response": None, "error": error}).encode()


def lines(*items: bytes) -> bytes:
    return b"".join(item + b"\n" for item in items)


async def joined(requests: bytes, good: bytes, bad: bytes) -> list[Joined]:
    return [row async for row in join(cut(requests), cut(good), cut(bad))]


async def test_every_row_is_joined_with_its_line() -> None:
    requests = lines(request("a"), b"", request(None), b"\xef\xbb\xbf" + request("b"), request("a"), request("c"))
    good = lines(result("a", good=True), result("c", good=True))
    bad = lines(result(None, good=False), result("b", good=False), result("a", good=False))
    rows = await joined(requests, good, bad)
    assert [(row.line, row.succeeded) for row in rows] == [(1, True), (3, False), (4, False), (5, False), (6, True)]
    assert rows[2].request == b"\xef\xbb\xbf" + request("b")
    assert rows[1].result == result(None, good=False)


async def test_one_file_with_every_row_is_joined_as_well() -> None:
    everything = lines(result("a", good=True), result(None, good=False), result("b", good=True))
    rows = await joined(lines(request("a"), request(None), request("b")), everything, b"")
    assert [row.succeeded for row in rows] == [True, False, True]


async def test_lines_after_the_last_row_of_a_trial_are_left_alone() -> None:
    assert len(await joined(lines(request("a"), request("b")), lines(result("a", good=True)), b"")) == 1


@pytest.mark.parametrize(
    ("requests", "good"),
    [(lines(request("x")), lines(result("a", good=True))), (b"", lines(result("a", good=True)))],
)
async def test_an_input_that_was_replaced_is_noticed(requests: bytes, good: bytes) -> None:
    with pytest.raises(MismatchError, match="the input was replaced since the run"):
        await joined(requests, good, b"")


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), max_size=12), st.integers(1, 40))
async def test_any_mixture_comes_back_in_order(rows: list[tuple[str | None, bool]], size: int) -> None:
    used: set[str] = set()
    good, bad, expected = [], [], []
    for custom_id, wants_success in rows:
        succeeds = wants_success and custom_id is not None and custom_id not in used
        if custom_id is not None:
            used.add(custom_id)
        (good if succeeds else bad).append(result(custom_id, good=succeeds))
        expected.append((custom_id, succeeds))
    requests = lines(*(request(custom_id) for custom_id, _ in rows))
    found = [row async for row in join(cut(requests, size), cut(lines(*good), size), cut(lines(*bad), size))]
    assert [(json.loads(row.result)["custom_id"], row.succeeded) for row in found] == expected
