"""A model and an adapter in a real bucket, on real vLLM: fetched, loaded offline, and named as the user wrote them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest

from airflow_vllm_batch.storage.settings import StoreFile, write_store_file
from tests.engine.conftest import ENGINE_FLAGS, ENVIRONMENT
from tests.support.commands import Done, vllm_batch
from tests.support.runs import read_rows, write_lines
from tests.support.seaweed import SeaweedServer

pytestmark = pytest.mark.s3
MODEL, ADAPTER = "s3://tests/models/tiny/", "s3://tests/models/law/"
# Rank 8 on the query projections of both layers, strong enough to change what a random model says.
MAKE_ADAPTER = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
torch.manual_seed(1)
places = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
tensors = {f"{place}.lora_A.weight": torch.randn(8, 64) for place in places}
tensors |= {f"{place}.lora_B.weight": torch.randn(64, 8) for place in places}
save_file(tensors, folder / "adapter_model.safetensors")
config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64, "lora_dropout": 0.0, "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
"""


class Ran(NamedTuple):
    done: Done
    folder: Path

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["custom_id"]: row["response"]["body"] for row in read_rows(self.folder / "out" / "output.jsonl")}

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "out" / "manifest.json").read_text()))

    def again(self) -> Done:
        return run_in(self.folder)


def run_in(folder: Path) -> Done:
    return vllm_batch(
        *("run", "--store", "store.json", "-i", "in.jsonl", "-o", "out/", "--model", MODEL),
        *("--lora-modules", f"law={ADAPTER}", "--max-lora-rank", "8", *ENGINE_FLAGS),
        # vLLM 0.32 on the CPU applies an adapter to rows of the base model in the same step (vllm pull request 48421).
        *("--max-num-seqs", "1"),
        cwd=folder,
        env={**ENVIRONMENT, "VLLM_BATCH_MODEL_CACHE": str(folder / "cache")},
        seconds=850,
    )


def upload(server: SeaweedServer, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            obstore.put(server.raw_store("tests"), f"{prefix}/{path.relative_to(folder)}", path)


def row(custom_id: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "The court finds", "temperature": 0, "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedServer, tiny_llama: str) -> Ran:
    folder = tmp_path_factory.mktemp("object-store-model")
    subprocess.run([sys.executable, "-c", MAKE_ADAPTER, folder / "law"], check=True, timeout=120)
    upload(s3_server, Path(tiny_llama), "models/tiny")
    upload(s3_server, folder / "law", "models/law")
    write_store_file(folder / "store.json", StoreFile(stores={"model": s3_server.settings()}))
    write_lines(folder / "in.jsonl", [row("base", MODEL), row("adapted", "law")])
    return Ran(run_in(folder), folder)


def test_model_and_adapter_answer_under_the_names_that_the_user_wrote(ran: Ran) -> None:
    assert ran.done.code == 0, ran.done.err[-4000:]
    assert {custom_id: body["model"] for custom_id, body in ran.rows.items()} == {"base": MODEL, "adapted": "law"}


def test_the_adapter_says_something_else_than_its_base(ran: Ran) -> None:
    base, adapted = (ran.rows[name]["choices"][0]["text"] for name in ("base", "adapted"))
    assert base != adapted


def test_the_manifest_names_the_uri_and_the_fingerprints(ran: Ran) -> None:
    model = ran.manifest["model"]
    assert (model["name"], model["served_names"]) == (MODEL, [MODEL, "law"])
    copies = {f"store:{path.name}" for path in (ran.folder / "cache").iterdir() if path.is_dir()}
    assert {model["fingerprint"], *model["adapters"].values()} == copies
    assert len(copies) == 2


def test_the_same_command_finds_the_run_finished(ran: Ran) -> None:
    again = ran.again()
    assert (again.code, again.out.splitlines()[0]) == (
        0,
        "The run is finished; nothing was started (--restart runs every row anew).",
    )
