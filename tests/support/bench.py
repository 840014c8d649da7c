"""A folder, an input of three rows and a worker without a process: what it takes to make one try after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.task import chat_row  # isort: skip  before Airflow

from airflow_vllm_batch.contract import AttemptRecord, BatchSpec, InputFile, OutputTarget
from airflow_vllm_batch.exceptions import VLLMBatchError
from airflow_vllm_batch.one_try import OneTry, Plan
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import StoreFile
from tests.support.fake_worker import FakeRun, FakeWorker, Script
from tests.support.manifests import make_spec

RUN_KEY = "evals-score-0000000000000000"


class Bench:
    """A folder, an input of three rows and a worker; each :meth:`run` is a try."""

    def __init__(self, root: Path, rows: list[Mapping[str, Any] | str] | None = None) -> None:
        self.output = root / "out"
        self.input = root / "in.jsonl"
        given = rows if rows is not None else [chat_row("a"), chat_row("b"), chat_row("c")]
        self.input.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in given))
        self.published: dict[str, Any] = {}
        self.lines: list[str] = []
        self.worker = FakeWorker(succeeds)
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.store: Callable[[], StoreFile] = StoreFile

    def spec(self, **changes: Any) -> BatchSpec:
        output = f"{self.output}/"
        places = {
            "inputs": (InputFile(uri=str(self.input)),),
            "output": OutputTarget(uri=output, state_uri=output),
            "attempt": None,
            "run_key": RUN_KEY,
        }
        spec = make_spec(**{**places, **changes})
        return spec.model_copy(update={"engine": spec.engine.model_copy(update={"kind": "echo"})})

    def try_once(self, *, script: Script | None = None, plan: dict[str, Any] | None = None, **changes: Any) -> OneTry:
        if script is not None:
            self.worker.script = script
        fields: dict[str, Any] = {
            "spec": self.spec(**changes),
            "worker": self.worker,
            "epoch": 0,
            "restart": False,
            "overwrite": False,
            "preflight": "full",
            "stage_input": "never",
            "poll_interval": 0.01,
            "created_by": "test",
            **(plan or {}),
        }
        self.published.clear()
        return OneTry(
            Plan(**fields),
            store=self.store,
            publish=self.published.__setitem__,
            emit=self.lines.append,
            now=self.now,
        )

    async def run(self, **arguments: Any) -> dict[str, Any]:
        return await self.try_once(**arguments).run()

    async def fails(self, **arguments: Any) -> VLLMBatchError:
        with pytest.raises(VLLMBatchError) as caught:
            await self.run(**arguments)
        return caught.value

    @property
    def folder(self) -> RunFolder:
        folder = RunFolder(Access.ambient(), self.spec().output)
        folder.at_generation(1)
        return folder

    async def attempt(self, number: int) -> AttemptRecord:
        record = await self.folder.read_attempt(number)
        assert record is not None
        return record


async def succeeds(run: FakeRun) -> int:
    await run.complete({"succeeded": 3})
    return 0


def exits(code: int) -> Script:
    async def script(run: FakeRun) -> int:
        return code

    return script


async def until_stopped(run: FakeRun) -> int:
    await run.told_to_stop.wait()
    return 75
