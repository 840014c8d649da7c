"""URIs and connections to what a spec and a store file say of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import task  # noqa: F401  # isort: skip  before Airflow

from airflow_vllm_batch.arguments import Refusal
from airflow_vllm_batch.connections import BY_SCHEME
from airflow_vllm_batch.reaching import Reached, absolute, reach


@pytest.fixture(autouse=True)
def _connections(monkeypatch: pytest.MonkeyPatch) -> None:
    aws = {"conn_type": "aws", "login": "AK", "password": "secret-key-1"}
    web = {"conn_type": "http", "host": "https://files.example/base", "login": "u", "password": "password-1"}
    monkeypatch.setenv("AIRFLOW_CONN_AWS_X", json.dumps(aws))
    monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", json.dumps({**aws, "login": "DEFAULT"}))
    monkeypatch.setenv("AIRFLOW_CONN_WEB", json.dumps(web))


def reached(**changes: Any) -> Reached:
    arguments = {
        "input_uri": "/in.jsonl",
        "output_uri": "/out",
        "state_uri": None,
        "input_conn_id": BY_SCHEME,
        "output_conn_id": BY_SCHEME,
    }
    return reach(**{**arguments, **changes})


def kinds(of: Reached) -> dict[str, str]:
    return {name: settings.kind for name, settings in of.store_file().stores.items()}


def test_a_folder_holds_its_own_state() -> None:
    output = reached(output_uri="s3://b/out", output_conn_id="aws_x").output
    assert (output.uri, output.state_uri, output.store) == ("s3://b/out/", "s3://b/out/", "output")


def test_one_object_has_its_state_beside_it_or_where_the_task_says() -> None:
    assert reached(output_uri="/d/all.jsonl").output.state_uri == "/d/all.vllm_batch/"
    output = reached(output_uri="/d/all.jsonl", state_uri="/state").output
    assert (output.uri, output.state_uri) == ("/d/all.jsonl", "/state/")


def test_input_and_output_have_their_own_entries() -> None:
    of = reached(input_uri="s3://b/in.jsonl", input_conn_id="aws_x")
    assert kinds(of) == {"input": "s3", "output": "local"}


def test_a_connection_of_both_sides_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_vllm_batch import reaching

    asked: list[str] = []

    def connect(uri: str, conn_id: str | None) -> Any:
        asked.append(uri)
        return real(uri, conn_id)

    real = reaching.connect
    monkeypatch.setattr(reaching, "connect", connect)
    of = reached(input_uri="s3://b/i", output_uri="s3://b/o/", input_conn_id="aws_x", output_conn_id="aws_x")
    assert asked == ["s3://b/i"]
    assert of.inputs[0].uri == "s3://b/i"
    assert of.output.uri == "s3://b/o/"


def test_a_connection_that_opens_no_url_is_for_the_state_beside_it() -> None:
    of = reached(output_uri="https://h/x?sig=abcdef", state_uri="s3://b/state", output_conn_id="aws_x")
    assert kinds(of) == {"input": "local", "output": "s3", "put": "http"}
    assert of.output.model_dump() == {
        "uri": "https://h/x",
        "state_uri": "s3://b/state/",
        "store": "put",
        "state_store": "output",
    }
    file = of.store_file()
    assert file.urls["https://h/x"].get_secret_value() == "https://h/x?sig=abcdef"
    assert '"AK"' in file.to_secret_bytes().decode()


def test_an_http_connection_takes_the_output_and_the_scheme_decides_for_the_state() -> None:
    of = reached(output_uri="results/x", state_uri="s3://b/state", output_conn_id="web")
    assert of.output.uri == "https://files.example/base/results/x"
    secrets = of.store_file().to_secret_bytes().decode()
    assert "password-1" in secrets
    assert '"DEFAULT"' in secrets


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"output_uri": "https://h/x"}, "give state_uri"),
        ({"output_uri": "x", "output_conn_id": "web"}, "give state_uri"),
        ({"output_uri": "https://h/x", "state_uri": "https://h/y/"}, "not an http"),
        ({"output_uri": "/out", "state_uri": "/elsewhere"}, "is a folder and holds its own state"),
    ],
)
def test_places_that_do_not_go_together_are_refused(changes: dict[str, Any], phrase: str) -> None:
    with pytest.raises(Refusal, match=phrase) as caught:
        reached(**changes)
    assert caught.value.exit_code == 64


def test_a_dump_of_the_store_file_shows_no_secret() -> None:
    of = reached(input_uri="s3://b/in", input_conn_id="aws_x", output_uri="https://h/x?sig=abcdef", state_uri="/s/")
    shown = f"{of} {of.store_file()!r} {of.store_file().to_bytes()!r}"
    assert "secret-key-1" not in shown
    assert "abcdef" not in shown


def test_plain_paths_become_absolute_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("a b/#c/") == f"{tmp_path}/a b/#c/"
    assert absolute("../x") == f"{tmp_path.parent}/x"
    assert absolute("s3://b/../x") == "s3://b/../x"
    assert absolute("file:///x") == "file:///x"


def test_a_model_in_object_storage_has_its_own_entry() -> None:
    weights = ["/models/llama", "s3://b/law/"]
    of = reached(weights=weights, model_conn_id="aws_x")
    assert kinds(of) == {"input": "local", "output": "local", "model": "s3"}
    assert '"AK"' in of.store_file().to_secret_bytes().decode()
    assert '"DEFAULT"' in reached(weights=weights).store_file().to_secret_bytes().decode()


@pytest.mark.parametrize("name", ["org/model", "/models/llama", "gpt2"])
def test_a_model_from_elsewhere_needs_no_connection(name: str) -> None:
    assert kinds(reached(weights=[name], model_conn_id="nowhere")) == {"input": "local", "output": "local"}


def test_weights_in_two_kinds_of_stores_are_refused() -> None:
    with pytest.raises(Refusal, match="several kinds of object storage") as caught:
        reached(weights=["s3://b/llama/", "gs://b/law/"])
    assert caught.value.exit_code == 64
