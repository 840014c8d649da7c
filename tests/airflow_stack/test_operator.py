"""The operator on a real Airflow: real tries, real XComs, a real child process, S3 through a connection."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import psutil
import pytest
import zstandard
from obstore.store import S3Store

from tests.support.airflow_stack import FINISHED, AirflowStack, Try
from tests.support.seaweed import SeaweedServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow_stack, pytest.mark.s3, pytest.mark.timeout(600)]

BUCKET = "tests"
SEGMENTS = "_vllm_batch/1/segments/"
CUT_OFF = '{"custom_id": "cut-off", "method": "POST", "url": "/v1/chat'
XCOM_KEYS = {
    "run_key",
    "state",
    "verdict",
    "output_uri",
    "errors_uri",
    "manifest_uri",
    "counts",
    "usage",
    "duration_s",
    "rows_per_second",
}


class Place(NamedTuple):
    """A folder of the bucket for one test."""

    store: S3Store
    folder: str

    @property
    def conf(self) -> dict[str, str]:
        return {"input_uri": f"s3://{BUCKET}/{self.folder}/in.jsonl", "output_uri": f"s3://{BUCKET}/{self.folder}/out/"}

    def put_input(self, *lines: str) -> None:
        obstore.put(self.store, f"{self.folder}/in.jsonl", "".join(line + "\n" for line in lines).encode())

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, f"{self.folder}/out/{name}").bytes())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(name).split(b"\n") if line]

    def names(self, below: str = "") -> list[str]:
        prefix = f"{self.folder}/out/{below}"
        return [item["path"] for page in obstore.list(self.store, prefix) for item in page]


@pytest.fixture
def place(s3_server: SeaweedServer, request: pytest.FixtureRequest) -> Place:
    return Place(s3_server.raw_store(BUCKET), f"stack/{request.node.name}")


def chat(custom_id: str, content: str = "hello") -> str:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "echo-model", "messages": [{"role": "user", "content": content}]},
        }
    )


def message(stack: AirflowStack, tried: Try) -> str:
    return "\n".join(stack.events(tried))


def test_a_batch_runs_and_the_next_task_reads_its_answers_through_the_xcom(
    airflow_stack: AirflowStack, place: Place
) -> None:
    place.put_input(chat("a", "first"), chat("b", "second"))

    run_id, state = airflow_stack.run("echo_batch", place.conf)

    batch = Try("echo_batch", run_id, "batch")
    assert state == "success", message(airflow_stack, batch)
    out = place.conf["output_uri"]
    manifest = json.loads(place.read("manifest.json"))
    returned = airflow_stack.xcom(batch)
    assert returned == {
        "run_key": manifest["run_key"],
        "state": "completed",
        "verdict": "pass",
        "output_uri": f"{out}output.jsonl",
        "errors_uri": f"{out}errors.jsonl",
        "manifest_uri": f"{out}manifest.json",
        "counts": {"rows": 2, "succeeded": 2, "failed": 0, "invalid": 0, "expired": 0, "cancelled": 0},
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "duration_s": returned["duration_s"],
        "rows_per_second": returned["rows_per_second"],
    }
    assert {key: airflow_stack.xcom(batch, key) for key in XCOM_KEYS} == returned
    read = [json.loads(line) for line in airflow_stack.xcom(Try("echo_batch", run_id, "read"))]
    assert [(row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"]) for row in read] == [
        ("a", "first"),
        ("b", "second"),
    ]
    assert place.rows("errors.jsonl") == []


def test_keys_with_spaces_and_signs_and_letters_of_other_languages_reach_the_store_unchanged(
    airflow_stack: AirflowStack, s3_server: SeaweedServer
) -> None:
    odd = Place(s3_server.raw_store(BUCKET), "stack/odd names #1 50% a+b é日本")
    odd.put_input(chat("a"))

    run_id, state = airflow_stack.run("echo_batch", odd.conf)

    assert state == "success", message(airflow_stack, Try("echo_batch", run_id, "batch"))
    assert airflow_stack.xcom(Try("echo_batch", run_id, "batch"), "output_uri") == (
        "s3://tests/stack/odd names #1 50% a+b é日本/out/output.jsonl"
    )
    assert [row["custom_id"] for row in odd.rows("output.jsonl")] == ["a"]


def test_too_many_bad_lines_fail_the_task_with_counts_reasons_and_places_and_still_give_an_xcom(
    airflow_stack: AirflowStack, place: Place
) -> None:
    place.put_input(chat("a"), CUT_OFF, chat("a"))

    run_id, state = airflow_stack.run("echo_batch", place.conf)

    batch = Try("echo_batch", run_id, "batch")
    said = message(airflow_stack, batch)
    assert state == "failed"
    for wanted in ("2", "invalid_json", "duplicate_custom_id", "allowed"):
        assert wanted in said
    assert airflow_stack.xcom_keys(batch) >= XCOM_KEYS
    assert airflow_stack.xcom(batch)["output_uri"] == f"{place.conf['output_uri']}output.jsonl"
    assert airflow_stack.task(Try("echo_batch", run_id, "read"))["state"] == "upstream_failed"


def test_a_share_of_bad_lines_that_the_run_allows_passes(airflow_stack: AirflowStack, place: Place) -> None:
    place.put_input(chat("a"), CUT_OFF, chat("c"))

    run_id, state = airflow_stack.run("echo_batch", {**place.conf, "vllm_batch": {"allowed_failures": 0.34}})

    batch = Try("echo_batch", run_id, "batch")
    assert state == "success", message(airflow_stack, batch)
    counts = airflow_stack.xcom(batch, "counts")
    assert (counts["rows"], counts["succeeded"], counts["invalid"]) == (3, 2, 1)
    (error,) = place.rows("errors.jsonl")
    assert error["error"]["code"] == "invalid_json"
    assert "line 2" in error["error"]["message"]


def test_a_connection_that_does_not_exist_fails_the_task_by_name_before_anything_is_started(
    airflow_stack: AirflowStack, place: Place
) -> None:
    place.put_input(chat("a"))

    run_id, state = airflow_stack.run("echo_batch", {**place.conf, "input_conn_id": "nowhere"})

    batch = Try("echo_batch", run_id, "batch")
    assert state == "failed"
    assert "nowhere" in message(airflow_stack, batch)
    returned = airflow_stack.xcom(batch)
    assert set(returned) == XCOM_KEYS
    assert (returned["state"], returned["verdict"], returned["counts"]) == ("failed", None, None)
    assert place.names() == []


def test_an_input_that_does_not_exist_fails_the_task_with_its_name(airflow_stack: AirflowStack, place: Place) -> None:
    run_id, state = airflow_stack.run("echo_batch", place.conf)

    batch = Try("echo_batch", run_id, "batch")
    assert state == "failed"
    assert place.conf["input_uri"] in message(airflow_stack, batch)
    assert airflow_stack.xcom(batch, "state") == "failed"


def test_the_folder_of_another_run_is_refused_and_left_as_it_is(airflow_stack: AirflowStack, place: Place) -> None:
    place.put_input(chat("a"))
    run_id, first = airflow_stack.run("echo_batch", place.conf)
    assert first == "success", message(airflow_stack, Try("echo_batch", run_id, "batch"))
    before = {name: bytes(obstore.get(place.store, name).bytes()) for name in place.names()}

    run_id, second = airflow_stack.run("echo_batch", place.conf)

    assert second == "failed"
    assert "{{ run_id }}" in message(airflow_stack, Try("echo_batch", run_id, "batch"))
    after = {name: bytes(obstore.get(place.store, name).bytes()) for name in place.names()}
    assert after == before


def test_a_killed_runner_costs_no_finished_row_and_has_nothing_of_airflows(
    airflow_stack: AirflowStack, s3_server: SeaweedServer, place: Place
) -> None:
    ids = [f"row-{number}" for number in range(150)]
    place.put_input(*map(chat, ids))
    run_id = airflow_stack.trigger("echo_retry", place.conf)
    wait_until(
        lambda: place.names(SEGMENTS) or the_end_of(airflow_stack, Try("echo_retry", run_id, "batch")),
        seconds=120,
        what="the first rows in storage",
    )
    runner = the_runner(place)
    environment, descriptors = runner.environ(), list(descriptors_of(runner.pid))
    task_and_supervisor = [each for above in runner.parents()[:2] for each in descriptors_of(above.pid)]

    runner.send_signal(signal.SIGKILL)

    batch = Try("echo_retry", run_id, "batch", number=2)
    assert airflow_stack.wait_for_run("echo_retry", run_id) == "success", message(airflow_stack, batch)
    assert airflow_stack.task(batch)["try_number"] == 2
    manifest = json.loads(place.read("manifest.json"))
    assert manifest["attempts"] == 2
    assert 0 < manifest["rows_reused"] < len(ids)
    assert manifest["counts"]["rows"] == len(ids)
    assert [row["custom_id"] for row in place.rows("output.jsonl")] == ids
    ran_first, ran_second = rows_run_by(place, attempt=1), rows_run_by(place, attempt=2)
    assert sorted(ran_first + ran_second) == sorted(ids)  # none was lost, none ran twice
    assert ran_first
    assert ran_second

    assert [name for name in environment if name.startswith("AIRFLOW")] == []
    assert not any(s3_server.secret_access_key in value for value in environment.values())
    assert next(each.is_pipe for each in descriptors if each.number == 0)
    of_airflow = {each.target for each in task_and_supervisor if each.is_socket}
    assert of_airflow
    assert not of_airflow & {each.target for each in descriptors}


def test_the_secret_of_the_connection_is_in_no_log_no_database_and_no_object(
    airflow_stack: AirflowStack, s3_server: SeaweedServer, place: Place
) -> None:
    place.put_input(chat("a"))
    run_id, state = airflow_stack.run("echo_batch", place.conf)
    batch = Try("echo_batch", run_id, "batch")
    assert state == "success", message(airflow_stack, batch)

    assert airflow_stack.files_holding(place.conf["output_uri"])  # the search finds what is there
    for secret in (s3_server.secret_access_key, s3_server.access_key_id):
        assert airflow_stack.files_holding(secret) == []
        assert secret not in json.dumps(airflow_stack.task(batch))
        assert secret not in airflow_stack.log(batch)
        assert [name for name in place.names() if secret.encode() in obstore.get(place.store, name).bytes()] == []


def the_end_of(stack: AirflowStack, tried: Try) -> None:
    """Fail with the log where a run ended although it should go on."""
    if (state := stack.run_state(tried.dag_id, tried.run_id)) in FINISHED:
        pytest.fail(f"the run ended as {state}: {message(stack, tried)}")


def the_runner(place: Place) -> psutil.Process:
    """Return the runner of a place's batch."""
    found = [
        process
        for process in psutil.process_iter()
        if (command := command_of(process))
        and "airflow_vllm_batch.runner" in command
        and any(argument.startswith(place.conf["output_uri"]) for argument in command)
    ]
    assert len(found) == 1
    return found[0]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def rows_run_by(place: Place, attempt: int) -> list[str]:
    """Return the rows in the segments of one try."""
    found = []
    for name in place.names(SEGMENTS):
        if Path(name).name.startswith(f"{attempt:02d}-"):
            packed = io.BytesIO(obstore.get(place.store, name).bytes())
            with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as raw:
                _header, *lines = raw.read().rstrip().split(b"\n")
            found += [json.loads(line)["custom_id"] for line in lines]
    return found


class Descriptor(NamedTuple):
    """An open file of a process; sockets and pipes have a name that is unique on the machine."""

    number: int
    target: str

    @property
    def is_socket(self) -> bool:
        return self.target.startswith("socket:")

    @property
    def is_pipe(self) -> bool:
        return self.target.startswith("pipe:")


def descriptors_of(pid: int) -> Iterator[Descriptor]:
    for path in sorted(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            yield Descriptor(int(path.name), str(path.readlink()))
