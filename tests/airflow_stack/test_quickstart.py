from __future__ import annotations

import pytest

from scripts import demo
from tests.support.airflow_stack import AirflowStack

pytestmark = [pytest.mark.airflow_stack, pytest.mark.s3, pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_demo_carries_a_batch_from_s3_through_airflow_and_vllm_to_the_next_task(
    airflow_stack: AirflowStack,
) -> None:
    printed = demo.run(airflow_stack)

    assert any("capital-of-france" in line and "Paris" in line for line in printed)
    assert any("invalid_json" in line for line in printed)


def test_the_demo_says_what_is_missing_where_the_answer_is_wrong() -> None:
    with pytest.raises(demo.DemoError, match="no Paris in it: capital-of-france: 'Lyon'"):
        demo.check(["capital-of-france: 'Lyon'"])
