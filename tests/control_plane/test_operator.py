"""The operator at parse time and around a try."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.task import (  # isort: skip  before Airflow
    FakeTaskInstance,
    chat_row,
    context_of,
    execute,
    execute_operator,
    make_operator,
)

from airflow.sdk import DAG
from airflow.sdk.execution_time.task_runner import _serialize_rendered_fields

from airflow_vllm_batch.exceptions import BatchStoppedError, ConnectionUnusableError, VLLMBatchFailedError
from airflow_vllm_batch.operators.vllm_batch import VLLMBatchOperator
from airflow_vllm_batch.workers import LocalWorker
from tests.support.fake_worker import FakeRun, FakeWorker

SIGNED = "https://files.example/in.jsonl?X-Amz-Signature=0123456789abcdef&X-Amz-Expires=60"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(chat_row("a")) + "\n")
    return {"input_uri": str(path), "output_uri": str(tmp_path / "out")}


def operator(**arguments: Any) -> VLLMBatchOperator:
    return make_operator(**{"input_uri": "/in.jsonl", "output_uri": "/out/", **arguments})


async def one_row(run: FakeRun) -> int:
    await run.complete({"succeeded": 1})
    return 0


# At parse time


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"engine": "vlm"}, "engine must be one of vllm, echo, got 'vlm'"),
        ({"bad_lines": "skip"}, "bad_lines must be one of isolate, strict"),
        ({"unknown_parameters": "ignore"}, "unknown_parameters must be one of error, warn, allow"),
        ({"order": "random"}, "order must be one of prefix, input"),
        ({"preflight": "none"}, "preflight must be one of full, sample, off"),
        ({"allowed_failures": 1.5}, "allowed_failures as a share must lie between 0.0 and 1.0, got 1.5"),
        ({"allowed_failures": -1}, "can't be negative"),
        ({"allowed_failures": True}, "is a number of rows (int) or a share of them (float)"),
        ({"row_retries": -1}, "row_retries: Input should be greater than or equal to 0"),
        ({"max_in_flight": 0}, "max_in_flight: Input should be greater than or equal to 1"),
        ({"limit": 0}, "limit: "),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds: "),
        ({"completion_window_seconds": 0}, "completion_window_seconds: "),
        ({"poll_interval": 0}, "poll_interval must be a number of seconds above 0"),
        ({"worker": "a100"}, "worker must be a worker such as LocalWorker(), got 'a100'"),
        ({"deferrable": True}, "deferrable=True: a LocalWorker runs beside the task"),
    ],
)
def test_a_wrong_argument_is_a_fault_of_the_dag_file(arguments: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ValueError) as caught:
        operator(**arguments)
    assert phrase in str(caught.value)


def test_an_argument_that_nobody_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="allowed_failure"):
        operator(allowed_failure=1)


def test_what_is_templated_is_not_looked_at_before_it_is_rendered() -> None:
    operator(model="{{ params.model }}", engine_args="{{ params.args }}", served_model_names=["{{ ds }}"])


def test_two_operators_do_not_share_a_worker() -> None:
    worker = LocalWorker(env_vars={"A": "{{ ds }}"})
    one, two = operator(worker=worker), operator(worker=worker)
    assert one.worker == two.worker == worker
    assert one.worker is not two.worker
    assert one.worker is not worker


def test_two_parses_give_the_same_dag_also_under_partial() -> None:
    def parse() -> str:
        from airflow.serialization.serialized_objects import DagSerialization

        with DAG("d", schedule=None) as dag:
            operator(worker=LocalWorker(python="/p", env_vars={"HF_TOKEN": "hf_secret"}), engine_args={"a": 1})
            VLLMBatchOperator.partial(
                task_id="mapped", model="m", output_uri="/o/", worker=LocalWorker(env_vars={"HF_TOKEN": "hf_secret"})
            ).expand(input_uri=["/a", "/b"])
        return json.dumps(DagSerialization.to_dict(dag), default=str, sort_keys=True)

    first, second = parse(), parse()
    assert first == second
    assert "hf_secret" not in first


def test_importing_the_operator_loads_no_storage_client_and_no_engine() -> None:
    code = (
        "import sys, airflow.sdk\n"
        "before = set(sys.modules)\n"
        "import airflow_vllm_batch.operators.vllm_batch\n"
        "heavy = {'aiohttp', 'obstore', 'zstandard', 'boto3', 'torch', 'vllm', 'kubernetes'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().splitlines()[-1] == "[]"


# Rendering


def rendered(op: VLLMBatchOperator) -> dict[str, Any]:
    context = context_of(FakeTaskInstance())
    op.render_template_fields({**context, "ds": "2026-01-01"})  # type: ignore[arg-type,typeddict-item]
    return _serialize_rendered_fields(op)


def test_places_model_arguments_and_worker_are_templated() -> None:
    op = operator(
        model="{{ ds }}-m",
        input_uri="s3://b/{{ ds }}/in.jsonl",
        output_uri="s3://b/{{ ds }}/out/",
        engine_args={"revision": "{{ ds }}"},
        worker=LocalWorker(python="/{{ ds }}/python", env_vars={"A": "{{ ds }}"}),
    )
    shown = rendered(op)
    assert shown["model"] == "2026-01-01-m"
    assert shown["input_uri"] == "s3://b/2026-01-01/in.jsonl"
    assert shown["output_uri"] == "s3://b/2026-01-01/out/"
    assert shown["engine_args"] == {"revision": "2026-01-01"}
    assert op.worker == LocalWorker(python="/2026-01-01/python", env_vars={"A": "2026-01-01"})
    assert shown["worker"] == {"env_vars": {"A": "***"}, "kind": "local", "python": "/2026-01-01/python"}


def test_a_signed_url_is_masked_as_soon_as_it_is_rendered() -> None:
    op = operator(input_uri="{{ url }}", output_uri="https://u:password-1@h/out?sig=abcdef")
    context = context_of(FakeTaskInstance())
    op.render_template_fields({**context, "url": SIGNED})  # type: ignore[arg-type,typeddict-item]
    shown = _serialize_rendered_fields(op)
    assert shown["input_uri"] == "https://files.example/in.jsonl?***"
    assert shown["output_uri"] == "https://h/out?***"
    assert op._full("input_uri") == SIGNED
    assert "0123456789abcdef" not in json.dumps(shown)


def test_a_mapped_task_masks_its_signed_url_too() -> None:
    with DAG("d", schedule=None):
        mapped = VLLMBatchOperator.partial(task_id="t", model="m", output_uri="/o/").expand(input_uri=[SIGNED])
    op = mapped.unmap({"input_uri": SIGNED})
    # As MappedOperator.render_template_fields does it.
    op._do_render_template_fields(op, op.template_fields, context_of(FakeTaskInstance()), op.get_template_env(), set())
    assert _serialize_rendered_fields(op)["input_uri"] == "https://files.example/in.jsonl?***"
    assert op._full("input_uri") == SIGNED


def test_rendering_again_keeps_the_url() -> None:
    op = operator(input_uri=SIGNED)
    for _ in range(2):
        op.render_template_fields(context_of(FakeTaskInstance()))  # type: ignore[arg-type]
    assert op._full("input_uri") == SIGNED


# A try


def test_a_batch_that_passes_returns_its_document(places: dict[str, Any]) -> None:
    outcome = execute(worker=FakeWorker(one_row), **places)
    assert outcome.result is not None
    assert outcome.result["verdict"] == "pass"
    assert outcome.result["run_key"].startswith("evals-score-")


def test_the_spec_says_what_the_arguments_say(places: dict[str, Any]) -> None:
    worker = FakeWorker(one_row)
    ti = FakeTaskInstance(map_index=3, try_number=2, max_tries=4)
    op = make_operator(
        worker=worker,
        served_model_names=["m", "n"],
        allowed_failures=0.25,
        bad_lines="strict",
        limit=7,
        seed=11,
        max_in_flight=5,
        order="input",
        echo_delay_seconds=0.5,
        engine_args={"max-model-len": 8},
        **places,
    )
    assert execute_operator(op, ti).result is not None
    spec = json.loads(Path(worker.runs[0].launch.spec_uri).read_text())
    assert spec["model"]["served_names"] == ["m", "n"]
    assert spec["policy"]["allowed_failures"] == 0.25
    assert spec["policy"]["bad_lines"] == "strict"
    assert spec["limits"]["limit"] == 7
    assert spec["limits"]["max_in_flight"] == 5
    assert spec["limits"]["order"] == "input"
    assert spec["engine"] == {"kind": "echo", "args": {}, "server_url": None, "delay_seconds": 0.5, "env": {}}
    assert (spec["seed"], spec["epoch"]) == (11, 4)
    assert spec["labels"] == {
        "dag_id": "evals",
        "run_id": "manual__1",
        "task_id": "score",
        "map_index": "3",
        "preflight": "full",
    }


def test_the_runs_conf_allows_other_failures(places: dict[str, Any]) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 1, "invalid": 1})
        return 3

    worker = FakeWorker(script)
    assert isinstance(execute(worker=worker, **places).error, VLLMBatchFailedError)
    outcome = execute(worker=worker, conf={"vllm_batch": {"allowed_failures": 0.5}}, **places)
    assert outcome.result is not None
    assert len(worker.runs) == 1


def test_the_runs_conf_restarts_once_per_clear(places: dict[str, Any]) -> None:
    worker = FakeWorker(one_row)
    execute(worker=worker, **places)
    for _ in range(2):
        ti = FakeTaskInstance(max_tries=1)
        assert execute(ti, worker=worker, conf={"vllm_batch": {"restart": True}}, **places).result is not None
    assert len(worker.runs) == 2


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"model": " "}, "model must be text that is not empty once rendered"),
        ({"engine_args": ["x"]}, "engine_args must map vLLM's arguments to values"),
        ({"output_uri": "ftp://h/x"}, "unknown scheme 'ftp'"),
        ({"output_uri": "https://h/x?sig=abcdef"}, "give state_uri"),
        ({"state_uri": "/elsewhere/"}, "state_uri goes with one object for all rows"),
        ({"conf": {"vllm_batch": {"restrt": True}}}, "may hold 'allowed_failures' and 'restart'"),
    ],
)
def test_a_wrong_value_of_a_template_or_conf_is_final_and_pushed(
    places: dict[str, Any], arguments: dict[str, Any], phrase: str
) -> None:
    outcome = execute(**{**places, **arguments})
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 64
    assert phrase in str(outcome.failure)
    assert outcome.xcoms["state"] == "failed"
    assert outcome.xcoms["return_value"]["verdict"] is None


def test_an_unreadable_connection_is_worth_a_retry_and_pushed(places: dict[str, Any]) -> None:
    outcome = execute(**{**places, "input_uri": "s3://b/in.jsonl", "input_conn_id": "aws_nowhere"})
    assert isinstance(outcome.error, ConnectionUnusableError)
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.xcoms["state"] == "failed"


def test_the_connection_of_a_model_is_rendered_and_asked_for_vllm_only(places: dict[str, Any]) -> None:
    arguments = {
        **places,
        "model": "s3://b/llama/",
        "model_conn_id": "{{ 'aws_' }}nowhere",
        "served_model_names": "m",
        "worker": FakeWorker(one_row),
    }
    outcome = execute(engine="vllm", **arguments)
    assert isinstance(outcome.error, ConnectionUnusableError)
    assert "'aws_nowhere'" in str(outcome.error)
    assert execute(engine="echo", **arguments).error is None


def test_an_xcom_that_can_not_be_pushed_does_not_hide_why_the_batch_failed(places: dict[str, Any]) -> None:
    def fail(key: str, value: Any) -> None:
        raise RuntimeError("the API server is away")

    outcome = execute(FakeTaskInstance(on_push=fail), **{**places, "input_uri": "/no/in.jsonl"})
    assert "the input does not exist" in str(outcome.failure)


def test_a_task_that_pushes_no_xcom_pushes_none(places: dict[str, Any]) -> None:
    outcome = execute(do_xcom_push=False, **{**places, "input_uri": "/no/in.jsonl"})
    assert outcome.xcoms == {}


def test_a_configured_default_of_deferring_falls_back_with_a_word(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__VLLM_BATCH__DEFAULT_DEFERRABLE", "True")
    with structlog.testing.capture_logs() as said:
        assert execute(worker=LocalWorker(), **places).result is not None
    assert any("deferrable is the configured default" in line["event"] for line in said)


def test_a_relative_path_is_made_absolute_for_whoever_reads_the_xcom(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = execute(worker=FakeWorker(one_row), input_uri="in.jsonl", output_uri="out")
    assert outcome.result is not None
    assert outcome.result["output_uri"] == f"{tmp_path}/out/output.jsonl"


# Stopping


def test_after_a_kill_execute_raises_even_where_the_batch_has_passed(places: dict[str, Any]) -> None:
    async def script(run: FakeRun) -> int:
        await run.complete({"succeeded": 1})
        op.on_kill()
        return 0

    op = make_operator(worker=FakeWorker(script), **places)
    outcome = execute_operator(op, FakeTaskInstance())
    assert isinstance(outcome.error, BatchStoppedError)
    assert not isinstance(outcome.error, VLLMBatchFailedError)


def test_a_kill_before_the_try_is_made_starts_nothing(places: dict[str, Any]) -> None:
    worker = FakeWorker(one_row)
    op = make_operator(worker=worker, **places)
    op.on_kill()
    assert isinstance(execute_operator(op, FakeTaskInstance()).error, BatchStoppedError)
    assert worker.runs == []


def test_a_kill_of_a_finished_task_does_nothing(places: dict[str, Any]) -> None:
    op = make_operator(worker=FakeWorker(one_row), **places)
    assert execute_operator(op, FakeTaskInstance()).result is not None
    op.on_kill()
