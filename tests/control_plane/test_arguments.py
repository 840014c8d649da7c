"""What can be told of a task's arguments by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_vllm_batch.arguments import Refusal, adapters, check_model, engine_arguments, served_names
from airflow_vllm_batch.contract.spec import Adapter


def test_names_get_underscores_and_short_flags_keep_their_dash() -> None:
    given = {"max-model-len": 1, "--enforce-eager": True, "-tp": 2, "seed_x": None}
    assert engine_arguments(given) == {"max_model_len": 1, "enforce_eager": True, "-tp": 2, "seed_x": None}
    assert engine_arguments(None) == {}


@pytest.mark.parametrize(
    ("given", "phrase"),
    [
        (["--x"], "engine_args must map vLLM's arguments to values"),
        ({"a": object()}, "'a' must be a JSON value"),
        ({"a": float("nan")}, "'a' must be a JSON value"),
        ({1: 2}, "1 is no name of an argument"),
        ({"--": 2}, "'--' is no name of an argument"),
        ({"a-b": 1, "a_b": 2}, "engine_args name a_b twice"),
        ({"model": "x"}, "'model' is the operator's own argument model"),
        ({"--served-model-name": "x"}, "is the operator's own argument served_model_names"),
    ],
)
def test_arguments_that_are_plainly_wrong_are_refused(given: Any, phrase: str) -> None:
    with pytest.raises(Refusal) as caught:
        engine_arguments(given)
    assert phrase in str(caught.value)
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("name", ["/no/model", "./no", "../no", "~/no", "a/b/c"])
def test_a_model_path_with_nothing_there_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match="there is nothing on this machine") as caught:
        check_model(name)
    assert caught.value.exit_code == 78


def test_a_model_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"is a folder without config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "gpt2", "s3://bucket/models/x"])
def test_a_name_of_a_hub_or_store_is_left_to_the_runner(name: str) -> None:
    check_model(name)


def test_served_names_are_one_or_many() -> None:
    assert served_names(None) == ()
    assert served_names("a") == ("a",)
    assert served_names(["a", "b"]) == ("a", "b")


def test_adapters_are_read_in_both_of_vllms_forms() -> None:
    assert adapters(["a=/x", {"name": "b", "path": "/y"}]) == (Adapter(name="a", uri="/x"), Adapter(name="b", uri="/y"))
    assert adapters("a=/x=y") == (Adapter(name="a", uri="/x=y"),)
    with pytest.raises(Refusal, match="lora_modules hold name=path or objects"):
        adapters(["a"])
