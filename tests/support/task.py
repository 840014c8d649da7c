"""An operator's ``execute`` outside a scheduler: the part of a task instance that it touches, and what it pushed.

Import this before anything of Airflow: it gives Airflow a home of its own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "True")

from airflow_vllm_batch.exceptions import VLLMBatchError
from airflow_vllm_batch.operators.vllm_batch import VLLMBatchOperator


@dataclass
class FakeTaskInstance:
    dag_id: str = "evals"
    run_id: str = "manual__1"
    task_id: str = "score"
    map_index: int = -1
    max_tries: int = 0
    try_number: int = 1
    xcoms: dict[str, Any] = field(default_factory=dict)
    on_push: Callable[[str, Any], None] = lambda key, value: None

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value
        self.on_push(key, value)


@dataclass
class FakeDagRun:
    conf: dict[str, Any] | None = None


def context_of(ti: FakeTaskInstance, conf: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"ti": ti, "task_instance": ti, "dag_run": FakeDagRun(conf), "run_id": ti.run_id}


@dataclass
class Outcome:
    """How a try ended: one of ``result`` and ``error`` is null."""

    result: dict[str, Any] | None
    error: Exception | None
    xcoms: dict[str, Any]

    @property
    def failure(self) -> VLLMBatchError:
        assert isinstance(self.error, VLLMBatchError), self.error or self.result
        return self.error


def execute(ti: FakeTaskInstance | None = None, *, conf: dict[str, Any] | None = None, **arguments: Any) -> Outcome:
    """Make one try of an operator with these arguments; echo, quick polls and no preflight surprises by default."""
    ti = ti or FakeTaskInstance()
    operator = make_operator(**arguments)
    return execute_operator(operator, ti, conf=conf)


def make_operator(**arguments: Any) -> VLLMBatchOperator:
    defaults: dict[str, Any] = {"task_id": "score", "model": "m", "engine": "echo", "poll_interval": 0.5}
    return VLLMBatchOperator(**{**defaults, **arguments})


def execute_operator(
    operator: VLLMBatchOperator, ti: FakeTaskInstance, *, conf: dict[str, Any] | None = None
) -> Outcome:
    context = context_of(ti, conf)
    operator.render_template_fields(context)  # type: ignore[arg-type]
    try:
        return Outcome(operator.execute(context), None, ti.xcoms)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  the outcome is what a test looks at
        return Outcome(None, error, ti.xcoms)


def chat_row(custom_id: str, content: str = "hello", **body: Any) -> Mapping[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body},
    }
