"""Failures of one cause in one group."""

from __future__ import annotations

import pytest

from airflow_vllm_batch.contract import ErrorCode
from airflow_vllm_batch.runner.error_groups import ErrorGroups, mask
from airflow_vllm_batch.runner.suggestions import suggestion


@pytest.mark.parametrize(
    ("message", "masked"),
    [
        ("maximum context length is 4096, got 5001.5", "maximum context length is <n>, got <n>"),
        ("request 0f8fad5b-d9cb-469f-a165-70867728950e failed", "request <id> failed"),
        ("request cmpl-972c24ab4843aa1f failed", "request cmpl-<id> failed"),
        ('custom_id "row-17": body.x', "custom_id <text>: body.x"),
        ("top_p must lie in [0, 1]", "top_p must lie in [<n>, <n>]"),
        ("utf8 and fp16 stay", "utf8 and fp16 stay"),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_what_differs_from_row_to_row_is_masked(message: str, masked: str) -> None:
    assert mask(message) == masked


def test_equal_causes_share_a_group_with_at_most_five_examples() -> None:
    groups = ErrorGroups()
    for number in range(10):
        groups.add("timeout", f"no answer within {number} s", f"r{number}", number)
    groups.add("invalid_json", "broken", None, 99)
    assert [(group.code, group.message, group.count, group.custom_ids, group.lines) for group in groups.top()] == [
        ("timeout", "no answer within <n> s", 10, ["r0", "r1", "r2", "r3", "r4"], [0, 1, 2, 3, 4]),
        ("invalid_json", "broken", 1, [], [99]),
    ]


def test_no_number_of_kinds_of_failures_grows_the_memory() -> None:
    groups = ErrorGroups()
    for number in range(5000):
        groups.add("engine_rejected", "".join(chr(97 + int(digit)) for digit in str(number)), "r", number)
    found = groups.top()
    assert (len(found), sum(group.count for group in found)) == (201, 5000)
    assert (found[0].message, found[0].count) == ("(further kinds of failures)", 4800)


def test_a_group_says_what_to_do_where_that_is_known() -> None:
    groups = ErrorGroups()
    groups.add("context_length_exceeded", "too long", "a", 1)
    assert groups.top()[0].suggestion == "raise max_model_len, shorten these prompts, or lower their max_tokens"
    unknown = {code.value for code in ErrorCode if suggestion(code) is None}
    # The whole file's faults have no rows; of a refusal only the engine's own words help.
    assert unknown == {"empty_file", "unsupported_file", "engine_rejected"}
