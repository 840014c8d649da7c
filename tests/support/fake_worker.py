"""A worker without a process: its runner is a coroutine of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from airflow_vllm_batch.contract import BatchSpec, Manifest
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import StoreFile
from airflow_vllm_batch.workers.base import EndKind, Launch, WorkerEnd
from tests.support.manifests import make_manifest

Script = Callable[["FakeRun"], Awaitable[int]]


class FakeRun:
    """What a script sees of its run."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.stores = [launch.store]
        self.told_to_stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[int] | None = None
        self.closed = False
        self.description = "fake"

    async def spec(self) -> BatchSpec:
        source = Access.from_document(self.launch.store).open_source(self.launch.spec_uri, "output")
        return BatchSpec.read(b"".join([chunk async for chunk in source.stream()]), "spec.json")

    async def folder(self) -> RunFolder:
        spec = await self.spec()
        folder = RunFolder(Access.from_document(self.launch.store), spec.output)
        folder.at_generation(spec.generation)
        return folder

    async def complete(self, by_outcome: dict[str, int], **changes: Any) -> Manifest:
        """Write outputs and a manifest as a runner does at its end."""
        spec, folder = await self.spec(), await self.folder()
        succeeded = by_outcome.get("succeeded", 0)
        outputs = []
        for role, lines in (("output", succeeded), ("errors", sum(by_outcome.values()) - succeeded)):
            info = await folder.store.put(f"{role}.jsonl", b"{}\n" * lines)
            outputs.append(
                {
                    "role": role,
                    "uri": folder.store.uri(f"{role}.jsonl"),
                    "lines": lines,
                    "bytes": info.size,
                    "etag": info.etag,
                    "sha256": "0",
                }
            )
        manifest = make_manifest(spec, by_outcome=by_outcome, outputs=outputs, **changes)
        await folder.write_manifest(manifest)
        return manifest

    # RunningWorker

    def begin(self, script: Script) -> Self:
        async def run() -> int:
            return await script(self)

        self._task = asyncio.ensure_future(run())
        return self

    def poll(self) -> WorkerEnd | None:
        if self._task is None or not self._task.done():
            return None
        code = self._task.result()
        kind = EndKind.EXITED if code >= 0 else EndKind.KILLED
        return WorkerEnd(kind, code, f"the runner ended with {code}")

    async def wait(self, timeout_seconds: float) -> WorkerEnd | None:
        assert self._task is not None
        await asyncio.wait({self._task}, timeout=timeout_seconds)
        return self.poll()

    def renew(self, store: StoreFile) -> None:
        self.stores.append(store)

    def ask_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self.told_to_stop.set)

    async def stop(self, *, wait_seconds: float) -> WorkerEnd:
        self.ask_to_stop()
        end = await self.wait(wait_seconds)
        assert end is not None, "the script does not heed told_to_stop"
        return end

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeWorker:
    """Runs ``script`` for each start; ``runs`` are the starts so far."""

    script: Script
    problem: Exception | None = None
    runs: list[FakeRun] = field(default_factory=list)

    kind: ClassVar[str] = "fake"
    template_fields: ClassVar[tuple[str, ...]] = ()
    can_defer: ClassVar[bool] = False
    reads_inputs: bool = False
    tells_progress: ClassVar[bool] = False

    def copy(self) -> Self:
        return self

    def serialize(self) -> dict[str, Any]:
        return {"kind": self.kind}

    async def check(self, engine: str) -> list[str]:
        if self.problem is not None:
            raise self.problem
        return []

    async def start(self, launch: Launch, emit: Callable[[str], None]) -> FakeRun:
        emit("fake runner started")
        run = FakeRun(launch)
        self.runs.append(run)
        return run.begin(self.script)
