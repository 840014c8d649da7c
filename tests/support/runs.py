"""A run on the local disk with an engine of the test's own: what it takes to call the runner's pipeline."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_vllm_batch.contract import BatchSpec, ExitCode, InputFile, Manifest, ModelSpec, OutputTarget
from airflow_vllm_batch.contract.spec import EngineSpec, Limits, RowPolicy
from airflow_vllm_batch.runner.engine.base import ENDPOINTS, EngineInfo, EngineStats, Refusal, Reply
from airflow_vllm_batch.runner.errors import EngineDownError
from airflow_vllm_batch.runner.pipeline import Try, run
from airflow_vllm_batch.runner.run_state import RunState
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import Store
from airflow_vllm_batch.storage.fingerprint import Fingerprints
from airflow_vllm_batch.storage.run_folder import RunFolder

MODEL = "m"
_PARTS_OF_A_TRY = frozenset({"closing", "patience", "may_write", "disk_usage"})


def chat(custom_id: str, content: str = "hello", **body: Any) -> dict[str, Any]:
    """Return a good chat request."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **body},
    }


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write requests, or lines as they are, to a batch file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def answer(content: str) -> bytes:
    """Return the body of a chat answer."""
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        }
    ).encode()


def said(body: bytes) -> str:
    """Return the text of the last message of a chat request."""
    return str(json.loads(body)["messages"][-1]["content"])


@dataclass
class ScriptedEngine:
    """Answers by a function of the prompt, and counts what it was asked.

    :param script: gets the last message and how often it was asked before; returns the reply or raises.
    """

    script: Callable[[str, int], Reply] = lambda text, _: Reply(200, answer(text))
    asked: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    restarts: int = 0
    dead: bool = False
    stops: int = 0

    async def start(self) -> EngineInfo:
        self.starts += 1
        return EngineInfo((MODEL,), frozenset(ENDPOINTS), max_num_seqs=4, values={"engine": "scripted"})

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        return None

    async def send(self, endpoint: str, body: bytes) -> Reply:
        await asyncio.sleep(0)
        text = said(body)
        if self.dead:
            raise EngineDownError("dead")
        self.asked[text] += 1
        try:
            return self.script(text, self.asked[text] - 1)
        except EngineDownError:
            self.dead = True
            raise

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def down(self) -> bool:
        return self.dead

    def progress_mark(self) -> int | None:
        return None

    def give_up(self, reason: str) -> None:
        self.dead = True

    async def restart(self) -> None:
        self.restarts += 1
        self.dead = False

    async def stop(self) -> None:
        self.stops += 1


class LocalRun:
    """A run folder below ``root`` that can be tried again and again."""

    def __init__(self, root: Path, lines: Iterable[Mapping[str, Any] | str], name: str = "in.jsonl") -> None:
        self.root = root
        self.input = write_lines(root / name, lines)
        self.output = root / "out"
        self._tries = 0

    def spec(self, **changes: Any) -> BatchSpec:
        policy = RowPolicy(**{name: changes.pop(name) for name in list(changes) if name in RowPolicy.model_fields})
        limits = Limits(**{name: changes.pop(name) for name in list(changes) if name in Limits.model_fields})
        fields: dict[str, Any] = {
            "run_key": "test-run",
            "inputs": (InputFile(uri=str(self.input)),),
            "output": OutputTarget(uri=f"{self.output}/", state_uri=f"{self.output}/"),
            "model": ModelSpec(name=MODEL),
            "engine": EngineSpec(kind="echo"),
            "policy": policy,
            "limits": limits,
        }
        return BatchSpec(**{**fields, **changes})

    def folder(self, spec: BatchSpec | None = None) -> RunFolder:
        return RunFolder(Access.ambient(), (spec or self.spec()).output)

    async def run(
        self, engine: Any, *, stop: StopSignal | None = None, store: Store | None = None, **changes: Any
    ) -> tuple[ExitCode, Manifest]:
        """Make one try; keywords change the try, or the spec, its policy or its limits.

        :param store: to use instead of the local disk that the spec names, for everything but the input.
        """
        parts = {name: changes.pop(name) for name in list(changes) if name in _PARTS_OF_A_TRY}
        spec = self.spec(**changes)
        folder = self.folder(spec)
        folder.store = store or folder.store
        await folder.claim(
            spec.run_key, epoch=0, restart=False, overwrite=False, created_by="test", now=datetime.now(UTC)
        )
        self._tries += 1
        spool = self.root / f"spool-{self._tries}"
        spool.mkdir()
        return await run(
            Try(
                spec=spec,
                spec_digest=spec.digest(),
                fingerprints=Fingerprints(None, {}),
                attempt=self._tries,
                folder=folder,
                engine=engine,
                spool=spool,
                state=RunState(spec.run_key, spec.generation, self._tries),
                stop=stop or StopSignal(),
                **parts,
            )
        )

    @property
    def succeeded(self) -> list[dict[str, Any]]:
        return read_rows(self.output / "output.jsonl")

    @property
    def failed(self) -> list[dict[str, Any]]:
        return read_rows(self.output / "errors.jsonl")
