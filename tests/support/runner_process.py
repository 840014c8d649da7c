"""A run folder whose tries are real processes of the runner with the echo engine."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from airflow_vllm_batch.contract import BatchSpec, InputFile, Lease, ModelSpec, OutputTarget, RunLayout
from airflow_vllm_batch.contract.spec import EngineSpec, Limits
from airflow_vllm_batch.runner.segments import decode_row, unpack
from airflow_vllm_batch.storage.settings import StoreFile, write_store_file
from tests.support.commands import start
from tests.support.runs import chat, read_rows, write_lines
from tests.support.waiting import wait_until

LAYOUT = RunLayout(1)


class ProcessRun:
    """Rows that take ``delay_seconds`` each, one after the other, with a checkpoint after every fourth."""

    def __init__(self, root: Path, rows: int = 40, delay_seconds: float = 0.1, **limits: Any) -> None:
        self.root = root
        self.output = root / "out"
        self.ids = [f"r{number}" for number in range(rows)]
        write_lines(root / "in.jsonl", [chat(name, f"p-{name}") for name in self.ids])
        self.spec = BatchSpec(
            run_key="process-test",
            inputs=(InputFile(uri=f"{root}/in.jsonl"),),
            output=OutputTarget(uri=f"{self.output}/", state_uri=f"{self.output}/"),
            model=ModelSpec(name="m"),
            engine=EngineSpec(kind="echo", delay_seconds=delay_seconds),
            limits=Limits(max_in_flight=1, checkpoint_rows=4, **limits),
        )
        (root / "spec.json").write_bytes(self.spec.to_bytes())
        write_store_file(root / "store.json", StoreFile())

    def start(self, *more: str, module: str = "airflow_vllm_batch.runner") -> subprocess.Popen[str]:
        return start(module, "--spec", f"{self.root}/spec.json", "--store", f"{self.root}/store.json", *more)

    def wait_for_segments(self, count: int) -> None:
        wait_until(lambda: len(self.segments()) >= count, what=f"{count} segments", seconds=40, pause_seconds=0.02)

    def wait_for_attempt(self, number: int, words: str) -> None:
        """Wait until an attempt says something in its progress."""

        def said() -> bool:
            path = self.output / LAYOUT.progress()
            if not path.exists():
                return False
            progress = json.loads(path.read_text())
            return progress["attempt"] == number and words in (progress["last_event"] or "")

        wait_until(said, what=f"{words!r} of attempt {number}", seconds=40, pause_seconds=0.02)

    def segments(self) -> list[Path]:
        return sorted((self.output / LAYOUT.segments).glob("*.zst"))

    def rows_kept(self) -> int:
        return len(
            {
                decode_row(line).custom_id
                for path in self.segments()
                for line in unpack(path.read_bytes())[1].splitlines()
            }
        )

    def attempt(self, number: int) -> dict[str, Any]:
        return dict(json.loads((self.output / LAYOUT.attempt(number)).read_text()))

    def lease(self) -> Lease:
        return Lease.read((self.output / LAYOUT.lease()).read_bytes(), "lease.json")

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.output / LAYOUT.manifest).read_text()))

    @property
    def answered(self) -> list[str]:
        return [row["custom_id"] for row in read_rows(self.output / LAYOUT.output)]

    def everything(self) -> dict[str, tuple[int, int]]:
        """Return each object with its moment and size; locks are no objects."""
        files = (path for path in self.output.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {str(path.relative_to(self.output)): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def freeze(process: subprocess.Popen[str]) -> None:
    """Stop a process and see that it stands still."""
    process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/stat")
    wait_until(
        lambda: state.read_text().rpartition(")")[2].split()[0] == "T",
        what="a frozen process",
        seconds=10,
        pause_seconds=0.01,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process to end; returns its exit code and what it printed."""
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def end_now(*processes: subprocess.Popen[str]) -> None:
    """Kill what is still alive, stopped ones too."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
