from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.batchfile.duplicates import IdTable


@given(st.lists(st.text(max_size=3), max_size=60))
def test_the_first_line_of_each_id_is_found(names: list[str]) -> None:
    table, first = IdTable(), dict[str, int]()
    for line, name in enumerate(names, 1):
        assert table.claim(name, line) == first.get(name)
        first.setdefault(name, line)
    assert len(table) == len(first)


def test_nothing_is_lost_when_the_table_grows() -> None:
    table = IdTable()
    for line in range(1, 40_001):
        assert table.claim(f"request-{line}", line) is None
    assert len(table) == 40_000
    assert all(table.claim(f"request-{line}", 99) == line for line in range(1, 40_001, 7))


def test_large_line_numbers_are_kept() -> None:
    table = IdTable()
    assert table.claim("a", 2**40 - 1) is None
    assert table.claim("a", 1) == 2**40 - 1


def test_an_id_takes_at_most_64_bytes_whatever_its_length() -> None:
    # 16,400 and 262,200 are just above the points where the table grows: there it is at its largest for an id.
    for count in (16_400, 50_000, 262_200):
        tracemalloc.start()
        table = IdTable()
        for line in range(count):
            table.claim(f"{'x' * 200}{line}", line)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak / count < 64
