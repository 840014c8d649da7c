"""A try of a task whose model lies in a real bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import Bench  # isort: skip  before Airflow

from airflow_vllm_batch.contract import EngineSpec, ModelSpec
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.model_objects import fingerprinted
from airflow_vllm_batch.storage.settings import StoreFile
from tests.support.fake_worker import FakeRun
from tests.support.seaweed import SeaweedServer


@pytest.mark.s3
async def test_a_done_batch_runs_anew_once_its_model_in_object_storage_is_overwritten(
    tmp_path: Path, s3_server: SeaweedServer
) -> None:
    bench = Bench(tmp_path)
    s3_server.put_raw("tests", "done/config.json", b"{}")
    bench.store = lambda: StoreFile(stores={"model": s3_server.settings()})
    spec = bench.spec(model=ModelSpec(name="s3://tests/done/", served_names=("m",))).model_copy(
        update={"engine": EngineSpec()}
    )

    async def script(run: FakeRun) -> int:
        seen = await fingerprinted(await run.spec(), Access.from_document(run.launch.store))
        model = {"name": seen.model.name, "fingerprint": seen.model.fingerprint}
        await run.complete({"succeeded": 3}, spec_digest=seen.digest(), model=model)
        return 0

    for _ in range(2):
        await bench.run(script=script, plan={"spec": spec})
    assert len(bench.worker.runs) == 1
    s3_server.put_raw("tests", "done/config.json", b"[]  ")
    error = await bench.fails(script=script, plan={"spec": spec})
    assert (error.exit_code, len(bench.worker.runs)) == (78, 1)
    s3_server.put_raw("tests", "done/config.json", b'{"a": 1}')
    await bench.run(script=script, plan={"spec": spec})
    assert len(bench.worker.runs) == 2
