"""The least a stack must do: run a task, log a line, hand a value on."""

from __future__ import annotations

import logging

from airflow.sdk import DAG, task

log = logging.getLogger(__name__)

with DAG("smoke", schedule=None):

    @task
    def greet(dag_run=None) -> str:  # type: ignore[no-untyped-def]
        log.info("greeting %s", dag_run.conf["name"])
        return f"hello {dag_run.conf['name']}"

    @task
    def repeat(said: str) -> str:
        return said.upper()

    repeat(greet())
