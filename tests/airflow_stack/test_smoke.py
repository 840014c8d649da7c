from __future__ import annotations

import pytest

from tests.support.airflow_stack import AirflowStack, Try

pytestmark = [pytest.mark.airflow_stack, pytest.mark.timeout(600)]


def test_a_dag_runs_on_the_real_stack_and_its_values_and_logs_can_be_read(airflow_stack: AirflowStack) -> None:
    run_id, state = airflow_stack.run("smoke", {"name": "world"})

    assert state == "success"
    assert airflow_stack.xcom(Try("smoke", run_id, "repeat")) == "HELLO WORLD"
    assert "greeting world" in airflow_stack.events(Try("smoke", run_id, "greet"))
    assert airflow_stack.xcom(Try("smoke", run_id, "repeat"), "absent") is None
