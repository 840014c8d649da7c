"""The example DAGs import on any Airflow, with none of the demo's variables set, and are what the README shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.architecture.blocked_imports import CHECKOUT, run_blocked

EXAMPLES = sorted((CHECKOUT / "dags_examples").glob("*.py"))

_LOAD = """
import json, runpy
from airflow.sdk import BaseOperator
found = {}
for path in %r:
    dags = {value.dag for value in runpy.run_path(path).values() if isinstance(value, BaseOperator)}
    found[path] = {dag.dag_id: sorted(dag.task_dict) for dag in dags}
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def dags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """Path of each example to its DAGs and their task ids."""
    child = run_blocked(
        _LOAD % [str(path) for path in EXAMPLES],
        ["torch", "vllm"],
        environment={"AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow"))},
    )
    assert child.returncode == 0, child.stderr
    line = next(line for line in child.stdout.splitlines() if line.startswith("FOUND "))
    return dict(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_one_dag_named_after_its_file(example: Path, dags: dict[str, dict[str, list[str]]]) -> None:
    assert list(dags[str(example)]) == [example.stem]
    assert dags[str(example)][example.stem]


def test_the_python_of_the_readme_is_the_python_of_the_examples() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / "README.md").read_text(), re.MULTILINE | re.DOTALL)

    assert blocks
    for block in blocks:
        assert any(block in example.read_text() for example in EXAMPLES), f"in no example: {block}"


def test_the_lines_of_the_quickstart_file_are_what_its_dag_expects() -> None:
    lines = (CHECKOUT / "dags_examples" / "data" / "quickstart.jsonl").read_text().splitlines()
    rows = []
    faulty = 0
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            faulty += 1

    assert faulty == 1
    assert {row["url"] for row in rows} == {"/v1/chat/completions", "/v1/completions"}
    assert len({row["custom_id"] for row in rows}) == len(rows)
