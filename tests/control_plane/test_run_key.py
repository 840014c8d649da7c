"""One key for every try of a task instance."""

from __future__ import annotations

import re

import pytest

from airflow_vllm_batch.contract.layout import check_run_key
from airflow_vllm_batch.run_key import run_key


@pytest.mark.parametrize(
    ("dag_id", "task_id"),
    [("evals", "score"), ("My DAG.äö", "group.task_1"), ("日本", "日本"), ("d" * 250, "t" * 250), ("-", "-")],
)
def test_a_key_is_a_valid_name_whatever_the_ids_are(dag_id: str, task_id: str) -> None:
    assert check_run_key(run_key(dag_id, "manual__2026-01-01T00:00:00+00:00", task_id, 3))


def test_a_key_tells_a_reader_the_task_and_ends_in_sixteen_hex_digits() -> None:
    assert re.fullmatch(r"evals-score-[0-9a-f]{16}", run_key("evals", "r", "score"))
    assert re.fullmatch(r"evals-score-7-[0-9a-f]{16}", run_key("evals", "r", "score", 7))


def test_a_task_that_is_not_mapped_has_one_key_however_airflow_says_so() -> None:
    assert run_key("d", "r", "t") == run_key("d", "r", "t", None) == run_key("d", "r", "t", -1)


def test_each_part_of_the_identity_makes_another_key() -> None:
    keys = {
        run_key("d", "r", "t"),
        run_key("d2", "r", "t"),
        run_key("d", "r2", "t"),
        run_key("d", "r", "t2"),
        run_key("d", "r", "t", 0),
        run_key("d", "r", "t", 1),
        run_key("dr", "", "t"),
    }
    assert len(keys) == 7
