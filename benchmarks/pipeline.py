"""The runner without a model: time and memory a row with the echo engine, bytes of state, time to the first row.

Each figure is a difference between a long and a short run of the same session, so that starting up cancels out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Taken, run, table

SHORT, LONG = 3_000, 30_000
ROW_BYTES = 1_000


def request(number: int) -> dict[str, Any]:
    text = f"row {number} " + "word " * ((ROW_BYTES - 150) // 5)
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": text}], "max_tokens": 16},
    }


def echo(folder: Path, rows: int) -> tuple[Taken, dict[str, Any], Path]:
    folder = folder / str(rows)
    folder.mkdir()
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(json.dumps(request(number)) + "\n" for number in range(rows))
    command = ["airflow_vllm_batch.cli", "run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--engine", "echo"]
    taken = run(command, folder)
    return taken, json.loads((folder / "out" / "manifest.json").read_text()), folder / "out"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        short, _, _ = echo(Path(scratch), SHORT)
        long, manifest, out = echo(Path(scratch), LONG)
        state = sum(path.stat().st_size for path in (out / "_vllm_batch").rglob("*") if path.is_file())
        written = sum(path.stat().st_size for path in out.glob("*.jsonl"))
        timing = manifest["timing"]
        more = LONG - SHORT
        before_rows = timing["total"] - timing["run"] - timing["write"]
        table(
            f"pipeline, echo engine, rows of {ROW_BYTES} bytes",
            [
                ("seconds a row", f"{(long.seconds - short.seconds) / more * 1e6:.0f} µs", "≤ 200 µs"),
                ("CPU a row", f"{(long.cpu_seconds - short.cpu_seconds) / more * 1e6:.0f} µs", ""),
                ("memory a row", f"{(long.peak_bytes - short.peak_bytes) / more:.0f} bytes", "≤ 1,024 bytes"),
                ("state written", f"{state / written:.2f} × the output", "≤ 1.2 ×"),
                (f"start to first row, {LONG:,} rows", f"{before_rows:.2f} s", "≤ 1 s for 10,000 rows"),
            ],
        )


if __name__ == "__main__":
    main()
