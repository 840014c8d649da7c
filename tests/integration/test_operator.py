"""The operator, a real runner process and the echo engine, on the local disk and on a real S3 server."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import obstore
import psutil
import pytest

from tests.support.task import (  # isort: skip  before Airflow
    FakeTaskInstance,
    Outcome,
    chat_row,
    execute,
    execute_operator,
    make_operator,
)

from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_vllm_batch.contract import AttemptRecord
from airflow_vllm_batch.exceptions import (
    BatchStoppedError,
    ConnectionUnusableError,
    VLLMBatchError,
    VLLMBatchFailedError,
)
from airflow_vllm_batch.workers import LocalWorker
from tests.support.seaweed import SeaweedServer

ODD = "a b/é #1/100%+?&=(x)日本"
"""A folder that a URL parser would cut, decode or encode."""


def lines_of(rows: list[Mapping[str, Any] | str]) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def rows_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n") if line]


class Folder:
    """An input of a few rows and an output beside it, on the local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.input = root / "in.jsonl"
        self.output = root / "out"
        self.write([chat_row("a", "hello"), chat_row("b", "world")])

    def write(self, rows: list[Mapping[str, Any] | str]) -> None:
        self.input.write_bytes(lines_of(rows))

    def run(self, ti: FakeTaskInstance | None = None, **arguments: Any) -> Outcome:
        return execute(ti, **{**self.places, **arguments})

    @property
    def places(self) -> dict[str, Any]:
        return {"input_uri": str(self.input), "output_uri": str(self.output)}

    def attempt(self, number: int) -> AttemptRecord:
        return AttemptRecord.read((self.output / f"_vllm_batch/1/attempts/{number:02d}.json").read_bytes(), "attempt")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# From the input to the XCom


def test_a_file_is_answered_in_its_order(folder: Folder) -> None:
    folder.write([chat_row(str(number), f"row {number}") for number in range(50)])
    outcome = folder.run()
    assert outcome.result is not None
    assert outcome.result["counts"] == {
        "rows": 50,
        "succeeded": 50,
        "failed": 0,
        "invalid": 0,
        "expired": 0,
        "cancelled": 0,
    }
    answers = rows_of(Path(outcome.result["output_uri"]).read_bytes())
    assert [row["custom_id"] for row in answers] == [str(number) for number in range(50)]
    assert answers[7]["response"]["status_code"] == 200
    assert Path(outcome.result["errors_uri"]).read_bytes() == b""
    assert json.loads(Path(outcome.result["manifest_uri"]).read_bytes())["verdict"]["passed"]
    assert outcome.xcoms["vllm_progress"]["phase"] == "done"


def test_a_bad_line_fails_the_task_after_the_others_are_answered(folder: Folder) -> None:
    folder.write([chat_row("a"), "nonsense", chat_row("c")])
    outcome = folder.run(run_anyway=True)
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 3
    said = str(outcome.failure)
    assert said.startswith("1 of 3 rows failed, 0 allowed (allowed_failures=0). 3 rows: 2 succeeded, 1 invalid.")
    assert "1 × invalid_json" in said
    assert f"Failed rows: {folder.output}/errors.jsonl" in said
    assert "pays only for the rows that are left" in said
    assert outcome.xcoms["counts"]["invalid"] == 1
    assert outcome.xcoms["verdict"] == "fail"
    assert outcome.xcoms["return_value"]["errors_uri"] == f"{folder.output}/errors.jsonl"
    assert [row["custom_id"] for row in rows_of((folder.output / "output.jsonl").read_bytes())] == ["a", "c"]


def test_another_threshold_judges_the_failed_run_again_without_a_runner(folder: Folder) -> None:
    folder.write([chat_row("a"), "nonsense", chat_row("c")])
    folder.run(run_anyway=True)
    # An interpreter that could start nothing: nobody asks it.
    outcome = folder.run(
        conf={"vllm_batch": {"allowed_failures": 1}}, worker=LocalWorker(python="/no/python"), run_anyway=True
    )
    assert outcome.result is not None
    assert outcome.result["verdict"] == "pass"
    verdict = json.loads((folder.output / "manifest.json").read_bytes())["verdict"]
    assert verdict["overall"]["judged_by"] == "operator"
    assert [earlier["passed"] for earlier in verdict["earlier"]] == [False]


def test_a_finished_run_is_not_run_again(folder: Folder) -> None:
    first = folder.run()
    assert folder.run(worker=LocalWorker(python="/no/python")).result == first.result


def test_a_row_added_to_the_input_is_the_only_one_that_runs(folder: Folder) -> None:
    folder.run()
    folder.write([chat_row("a", "hello"), chat_row("b", "world"), chat_row("c", "new")])
    outcome = folder.run()
    assert outcome.result is not None
    assert outcome.result["counts"]["succeeded"] == 3
    assert folder.attempt(2).rows_reused == 2


def test_a_compressed_input_is_read(folder: Folder) -> None:
    packed = folder.root / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(folder.input.read_bytes()))
    outcome = folder.run(input_uri=str(packed))
    assert outcome.result is not None
    assert outcome.result["counts"]["succeeded"] == 2


def test_one_object_takes_all_rows_and_state_lies_beside_it(folder: Folder) -> None:
    outcome = folder.run(output_uri=f"{folder.root}/all.jsonl")
    assert outcome.result is not None
    assert outcome.result["output_uri"] == outcome.result["errors_uri"] == f"{folder.root}/all.jsonl"
    assert outcome.result["manifest_uri"] == f"{folder.root}/all.vllm_batch/manifest.json"
    assert len(rows_of((folder.root / "all.jsonl").read_bytes())) == 2


# S3, by an Airflow connection


@pytest.fixture
def aws_evals(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    connection = {
        "conn_type": "aws",
        "login": s3_server.access_key_id,
        "password": s3_server.secret_access_key,
        "extra": {
            "region_name": s3_server.region,
            "service_config": {"s3": {"endpoint_url": s3_server.endpoint_url}},
        },
    }
    monkeypatch.setenv("AIRFLOW_CONN_AWS_EVALS", json.dumps(connection))
    return s3_server


@pytest.mark.s3
def test_odd_keys_are_read_and_written_exactly_through_a_connection(aws_evals: SeaweedServer) -> None:
    raw = aws_evals.raw_store("tests")
    key = f"operator/{ODD}/in file.jsonl"
    obstore.put(raw, key, lines_of([chat_row("a"), chat_row("b")]))
    outcome = execute(
        input_uri=f"s3://tests/{key}",
        output_uri=f"s3://tests/operator/{ODD}/out",
        input_conn_id="aws_evals",
        output_conn_id="aws_evals",
    )
    assert outcome.result is not None, outcome.error
    assert outcome.result["output_uri"] == f"s3://tests/operator/{ODD}/out/output.jsonl"
    answers = rows_of(bytes(obstore.get(raw, f"operator/{ODD}/out/output.jsonl").bytes()))
    assert [row["custom_id"] for row in answers] == ["a", "b"]
    spec = bytes(obstore.get(raw, f"operator/{ODD}/out/_vllm_batch/1/spec.json").bytes()).decode()
    assert aws_evals.secret_access_key not in spec


@pytest.mark.s3
def test_a_missing_object_is_named_and_worth_a_retry(aws_evals: SeaweedServer) -> None:
    outcome = execute(
        input_uri="s3://tests/operator/no such+key.jsonl",
        output_uri="s3://tests/operator/missing/out",
        input_conn_id="aws_evals",
        output_conn_id="aws_evals",
    )
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 69
    assert "the input does not exist: 's3://tests/operator/no such+key.jsonl'" in str(outcome.failure)
    assert "'+' is a plus" in str(outcome.failure)
    assert outcome.xcoms["state"] == "failed"


@pytest.mark.s3
def test_wrong_keys_are_told_without_showing_them(
    aws_evals: SeaweedServer, monkeypatch: pytest.MonkeyPatch, folder: Folder
) -> None:
    wrong = {
        "conn_type": "aws",
        "login": aws_evals.access_key_id,
        "password": "wrong-secret-key-1",
        "extra": {"region_name": "us-east-1", "endpoint_url": aws_evals.endpoint_url},
    }
    monkeypatch.setenv("AIRFLOW_CONN_AWS_WRONG", json.dumps(wrong))
    for place in ("input", "output"):
        outcome = folder.run(**{f"{place}_uri": "s3://tests/wrong/x.jsonl", f"{place}_conn_id": "aws_wrong"})
        assert not isinstance(outcome.error, VLLMBatchFailedError)
        assert outcome.failure.exit_code == 69
        assert "s3://tests/wrong/x" in str(outcome.failure)
        assert "wrong-secret-key-1" not in str(outcome.failure)


# Bad input, before an engine starts


def test_an_unreadable_connection(folder: Folder) -> None:
    outcome = folder.run(input_uri="s3://b/in.jsonl", input_conn_id="aws_nowhere")
    assert isinstance(outcome.error, ConnectionUnusableError)
    assert "connection 'aws_nowhere' can't be read" in str(outcome.failure)
    assert outcome.xcoms["state"] == "failed"
    assert not folder.output.exists()


def test_a_missing_file(folder: Folder) -> None:
    outcome = folder.run(input_uri=str(folder.root / "nothing.jsonl"))
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 69
    assert "the input does not exist" in str(outcome.failure)
    assert folder.attempt(1).exit_code == 69


def test_an_empty_file(folder: Folder) -> None:
    folder.input.write_bytes(b"")
    outcome = folder.run()
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 65
    assert "is empty (0 bytes)" in str(outcome.failure)
    assert folder.attempt(1).final


def test_a_wrong_model_name_in_the_rows(folder: Folder) -> None:
    folder.write([chat_row("a", model="gpt-4o"), chat_row("b", model="gpt-4o")])
    outcome = folder.run(served_model_names=["m"])
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 65
    assert "no line can run" in str(outcome.failure)
    assert "model_mismatch 2" in str(outcome.failure)


@pytest.mark.parametrize(
    ("model", "phrase"),
    [("/no/such/model", "there is nothing on this machine"), ("EMPTY", "is a folder without config.json")],
)
def test_a_model_that_can_not_be_loaded(folder: Folder, model: str, phrase: str) -> None:
    outcome = folder.run(model=str(folder.root) if model == "EMPTY" else model, engine="vllm", served_model_names="m")
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 78
    assert phrase in str(outcome.failure)


def test_an_output_that_can_not_be_written(folder: Folder) -> None:
    (folder.root / "file").write_text("")
    outcome = folder.run(output_uri=str(folder.root / "file" / "out"))
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 69
    assert f"{folder.root}/file/out" in str(outcome.failure)


def test_the_folder_of_another_run(folder: Folder) -> None:
    first = folder.run()
    outcome = folder.run(FakeTaskInstance(run_id="another"))
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 64
    assert "belongs to another run (evals-score-" in str(outcome.failure)
    assert "put {{ run_id }} (and the map index) into the path" in str(outcome.failure)
    # Nothing that was there is lost, and nothing was added.
    assert folder.run().result == first.result


def test_the_same_object_as_input_and_output(folder: Folder) -> None:
    before = folder.input.read_bytes()
    outcome = folder.run(output_uri=str(folder.input))
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 64
    assert "input and output are the same object" in str(outcome.failure)
    assert folder.input.read_bytes() == before


def test_an_interpreter_without_the_package(folder: Folder) -> None:
    python = folder.root / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    outcome = folder.run(worker=LocalWorker(python=str(python)))
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == 78
    assert "can't import airflow_vllm_batch (ModuleNotFoundError" in str(outcome.failure)


# The child process


class Watcher(FakeTaskInstance):
    """Looks at the runner once its rows run: ``act`` is called with its process."""

    def __init__(self, act: Any) -> None:
        super().__init__(on_push=self._look)
        self._act = act
        self.acted = False

    def _look(self, key: str, value: Any) -> None:
        if key == "vllm_progress" and value["phase"] == "running" and not self.acted:
            self.acted = True
            (runner,) = [
                child
                for child in psutil.Process().children(recursive=True)
                if "airflow_vllm_batch.runner" in child.cmdline()
            ]
            self._act(runner)


def test_the_child_has_no_variable_and_no_descriptor_of_airflow(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SECRET", "aws://user:hunter22@")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "fernet-key-1")
    monkeypatch.setenv("MY_DATABASE_PASSWORD", "hunter22")
    seen: dict[str, Any] = {}

    def look(runner: psutil.Process) -> None:
        seen["environment"] = runner.environ()
        descriptors = Path(f"/proc/{runner.pid}/fd").iterdir()
        seen["descriptors"] = {int(link.name): str(link.readlink()) for link in descriptors}
        seen["arguments"] = runner.cmdline()
        runner.kill()

    # As in a task process: descriptor 0 and another, inheritable one, are sockets of the supervisor.
    import socket

    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    with ours, theirs:
        inode = os.fstat(theirs.fileno()).st_ino
        folder.run(Watcher(look), echo_delay_seconds=600)
    names = set(seen["environment"])
    assert not {name for name in names if "AIRFLOW" in name}
    assert "MY_DATABASE_PASSWORD" not in names
    assert "hunter22" not in str(seen)
    assert f"socket:[{inode}]" not in seen["descriptors"].values()
    assert seen["descriptors"][0].startswith("pipe:")


def test_a_killed_runner_is_told_of_and_the_next_try_goes_on(folder: Folder) -> None:
    outcome = folder.run(Watcher(lambda runner: runner.kill()), echo_delay_seconds=600)
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert outcome.failure.exit_code == -signal.SIGKILL
    assert "the runner was killed by SIGKILL" in str(outcome.failure)
    assert "a retry runs only the rows without a result" in str(outcome.failure)
    record = folder.attempt(1)
    assert (record.exit_code, record.final) == (-signal.SIGKILL, False)


def test_a_kill_stops_the_child_and_execute_raises(folder: Folder) -> None:
    pids: list[int] = []

    def kill(runner: psutil.Process) -> None:
        pids.append(runner.pid)
        os.kill(os.getpid(), signal.SIGTERM)  # as the supervisor does it

    op = make_operator(echo_delay_seconds=600, **folder.places)
    before = signal.signal(signal.SIGTERM, lambda number, frame: op.on_kill())
    try:
        outcome = execute_operator(op, Watcher(kill))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(outcome.error, BatchStoppedError)
    assert not isinstance(outcome.error, VLLMBatchFailedError)
    assert "Finished rows are kept" in str(outcome.error)
    assert not psutil.pid_exists(pids[0])
    record = folder.attempt(1)
    assert record.exit_code == 75
    assert not record.final


def test_a_timeout_of_the_task_stops_the_child(folder: Folder) -> None:
    pids: list[int] = []

    def alarm(number: int, frame: FrameType | None) -> None:
        raise AirflowTaskTimeout("timed out")

    def ring(runner: psutil.Process) -> None:
        pids.append(runner.pid)
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # rings while the loop waits

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with pytest.raises(AirflowTaskTimeout):
            folder.run(Watcher(ring), echo_delay_seconds=600)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not psutil.pid_exists(pids[0])
    assert folder.attempt(1).exit_code == 75


def test_the_store_file_is_gone_afterwards(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert folder.run().result is not None
    assert list(temporary.iterdir()) == []


def test_every_failure_is_an_error_that_airflow_knows(folder: Folder) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    assert issubclass(VLLMBatchError, AirflowException)
    assert issubclass(VLLMBatchFailedError, AirflowFailException)
    assert not issubclass(BatchStoppedError, AirflowFailException)
