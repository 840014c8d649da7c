"""What a model is, beyond its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import BatchSpec, EngineSpec, InputFile, ModelSpec, OutputTarget
from airflow_vllm_batch.contract.spec import Adapter
from airflow_vllm_batch.storage.fingerprint import fingerprints_of, model_fingerprint, names_a_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.safetensors").write_bytes(b"\0" * 100)
    return folder


def test_a_folder_keeps_its_fingerprint_wherever_it_lies(checkpoint: Path) -> None:
    before = model_fingerprint(str(checkpoint))
    assert before is not None
    assert before.startswith("path:")
    moved = checkpoint.with_name("moved")
    checkpoint.rename(moved)
    assert model_fingerprint(str(moved)) == before


@pytest.mark.parametrize("change", ["size", "time", "new", "gone", "renamed"])
def test_a_checkpoint_that_is_overwritten_in_place_is_a_new_model(checkpoint: Path, change: str) -> None:
    before = model_fingerprint(str(checkpoint))
    weights = checkpoint / "sub" / "weights.safetensors"
    match change:
        case "size":
            weights.write_bytes(b"\0" * 101)
        case "time":
            os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
        case "new":
            (checkpoint / "adapter.json").touch()
        case "gone":
            weights.unlink()
        case "renamed":
            weights.rename(weights.with_name("other.safetensors"))
    assert model_fingerprint(str(checkpoint)) != before


def test_a_hub_model_is_the_commit_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_fingerprint("org/model") is None
    folder = tmp_path / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc\n")
    (folder / "snapshots" / "deadbeef").mkdir(parents=True)
    assert model_fingerprint("org/model") == "hub:0123abc"
    assert model_fingerprint("org/model", "deadbeef") == "hub:deadbeef"
    assert model_fingerprint("org/model", "v2") is None


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        ("org/model", False),
        ("gpt2", False),
        ("./model", True),
        ("/models/a", True),
        ("models/a/b", True),
        ("~/m", True),
    ],
)
def test_a_name_that_can_only_be_a_path(name: str, is_path: bool) -> None:
    assert names_a_path(name) is is_path


def test_the_fingerprints_of_a_spec_are_those_of_vllms_weights(checkpoint: Path) -> None:
    def spec(engine: EngineSpec) -> BatchSpec:
        return BatchSpec(
            run_key="a",
            inputs=(InputFile(uri="in.jsonl"),),
            output=OutputTarget(uri="out/", state_uri="out/"),
            model=ModelSpec(name=str(checkpoint), adapters=(Adapter(name="law", uri=str(checkpoint / "sub")),)),
            engine=engine,
        )

    found = fingerprints_of(spec(EngineSpec()))
    assert found.model == model_fingerprint(str(checkpoint))
    assert found.adapters == {"law": model_fingerprint(str(checkpoint / "sub"))}
    # An echo and a server name a model that need not lie here.
    assert fingerprints_of(spec(EngineSpec(kind="echo"))) == (None, {"law": None})
