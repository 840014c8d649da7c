"""The runner as a process on a real S3 server that is cut off, or refuses its keys, while rows run."""

from __future__ import annotations

import json
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from pydantic import SecretStr

from airflow_vllm_batch.contract import BatchSpec, InputFile, ModelSpec, OutputTarget
from airflow_vllm_batch.contract.spec import EngineSpec, Limits
from airflow_vllm_batch.storage.settings import S3Settings, StoreFile, write_store_file
from tests.support.commands import start
from tests.support.runner_process import end_now
from tests.support.runs import chat, write_lines
from tests.support.seaweed import SeaweedServer
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.s3
ROWS = 100


class S3Run:
    """A run of ten seconds from the local disk to a folder in S3."""

    def __init__(self, root: Path, server: SeaweedServer, endpoint_url: str) -> None:
        self.root = root
        self.prefix = f"{uuid.uuid4().hex}/out"
        self.raw = server.raw_store("tests")
        self.settings = S3Settings(
            access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key,
            endpoint_url=endpoint_url,
            region=server.region,
        )
        write_lines(root / "in.jsonl", [chat(f"r{number}", f"p{number}") for number in range(ROWS)])
        spec = BatchSpec(
            run_key="s3-test",
            inputs=(InputFile(uri=f"{root}/in.jsonl"),),
            output=OutputTarget(uri=f"s3://tests/{self.prefix}/", state_uri=f"s3://tests/{self.prefix}/"),
            model=ModelSpec(name="m"),
            engine=EngineSpec(kind="echo", delay_seconds=0.1),
            limits=Limits(max_in_flight=1, checkpoint_rows=5),
        )
        (root / "spec.json").write_bytes(spec.to_bytes())
        self.write_store(self.settings)

    def write_store(self, settings: S3Settings) -> None:
        # The runner opens every place by the entry "output"; the local disk needs none.
        write_store_file(self.root / "store.json", StoreFile(stores={"output": settings}))

    def start(self) -> subprocess.Popen[str]:
        runner = ("airflow_vllm_batch.runner", "--spec", f"{self.root}/spec.json")
        return start(*runner, "--store", f"{self.root}/store.json")

    def segments(self) -> list[str]:
        return [meta["path"] for meta in obstore.list(self.raw, f"{self.prefix}/_vllm_batch/1/segments").collect()]

    def document(self, name: str) -> dict[str, Any]:
        return dict(json.loads(bytes(obstore.get(self.raw, f"{self.prefix}/{name}").bytes())))

    def answered(self) -> list[str]:
        lines = bytes(obstore.get(self.raw, f"{self.prefix}/output.jsonl").bytes()).splitlines()
        return [json.loads(line)["custom_id"] for line in lines]


class Listener:
    """Reads what a process prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, words: str) -> None:
        wait_until(lambda: any(words in line for line in self.lines), what=repr(words), seconds=90, pause_seconds=0.05)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=100)
        self._thread.join(timeout=10)
        return code, "".join(self.lines)


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    started: list[Listener] = []
    yield started
    for listener in started:
        if listener.process.poll() is None:
            end_now(listener.process)


def test_a_server_that_is_cut_off_costs_no_row(
    tmp_path: Path, s3_server: SeaweedServer, listeners: list[Listener]
) -> None:
    with TcpProxy(s3_server.endpoint_url) as way:
        run = S3Run(tmp_path, s3_server, way.url)
        runner = Listener(run.start())
        listeners.append(runner)
        wait_until(lambda: len(run.segments()) >= 2, what="two segments", seconds=60, pause_seconds=0.1)
        way.cut()
        runner.wait_for("storage is away, finished rows wait on the local disk")
        way.mend()
        code, said = runner.end()
    assert code == 0, said
    assert "storage is back" in said
    assert (run.answered(), run.document("manifest.json")["counts"]["by_outcome"]) == (
        [f"r{number}" for number in range(ROWS)],
        {"succeeded": ROWS},
    )
    assert run.document("_vllm_batch/1/lease.json")["released_at"] is not None


def test_keys_that_are_refused_in_mid_run_and_renewed_in_the_file_cost_no_row(
    tmp_path: Path, s3_server: SeaweedServer, listeners: list[Listener]
) -> None:
    run = S3Run(tmp_path, s3_server, s3_server.endpoint_url)
    runner = Listener(run.start())
    listeners.append(runner)
    wait_until(lambda: len(run.segments()) >= 2, what="two segments", seconds=60, pause_seconds=0.1)
    run.write_store(run.settings.model_copy(update={"secret_access_key": SecretStr("expired-key-0000000000")}))
    runner.wait_for("storage is away, finished rows wait on the local disk")
    run.write_store(run.settings)
    code, said = runner.end()
    assert code == 0, said
    assert "permission denied" in said
    assert run.answered() == [f"r{number}" for number in range(ROWS)]
    assert s3_server.secret_access_key not in said
