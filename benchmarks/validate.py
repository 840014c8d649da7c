"""Rows a second that one core checks, against ``json.loads`` on the same lines, and the memory that a row costs.

    python benchmarks/validate.py [--rows 200000] [--rounds 7]

Both sides run in turn, in short rounds; the best round of each counts, in CPU time, so that other work on the machine
weighs on neither.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple

from airflow_vllm_batch.batchfile import Checker, Rules, Tally, scan

CHUNK = 1 << 20
RULES = Rules(served_names=frozenset({"m"}))


class Workload(NamedTuple):
    name: str
    make: Callable[[int], bytes]


def plain(number: int) -> bytes:
    """A chat row of about 1 KB: a system prompt, a question, two parameters."""
    return line(number, messages=chat(number, "Name a river and say where it ends. " * 21), max_tokens=8)


def escaped(number: int) -> bytes:
    """The same with line breaks and quotation marks in the text, as most prompts have them."""
    return line(number, messages=chat(number, 'He said "name a river"\n' * 30), max_tokens=8)


def structured(number: int) -> bytes:
    """A row that takes the long way: content parts and a schema."""
    parts = [{"type": "text", "text": "Name a river and say where it ends. " * 16}]
    schema = {"name": "r", "schema": {"type": "object", "properties": {"river": {"type": "string"}}}}
    return line(
        number,
        messages=[{"role": "user", "content": parts}],
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=8,
    )


def faulty(number: int) -> bytes:
    """Every tenth row is bad, in one of three ways."""
    if number % 10:
        return plain(number)
    return (b'{"custom_id": oops\n', line(number, messages=[]), line(number, messages=chat(number, "x"), top_P=1))[
        number // 10 % 3
    ]


def chat(number: int, question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"{number}. {question}"},
    ]


def line(number: int, **body: object) -> bytes:
    request = {
        "custom_id": f"request-{number:09d}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", **body, "temperature": 0.2},
    }
    return json.dumps(request).encode() + b"\n"


def chunks(workload: Workload, rows: int) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for number in range(rows):
        row = workload.make(number)
        held.append(row)
        size += len(row)
        if size >= CHUNK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def check_all(stream: list[bytes]) -> None:
    for _ in scan(stream, RULES):
        pass


def load_all(stream: list[bytes]) -> None:
    for chunk in stream:
        for raw in chunk.split(b"\n"):
            try:
                json.loads(raw)
            except ValueError:
                continue


def cpu_seconds(act: Callable[[list[bytes]], None], stream: list[bytes]) -> float:
    before = time.process_time()
    act(stream)
    return time.process_time() - before


def measure_speed(workload: Workload, rows: int, rounds: int) -> None:
    stream = list(chunks(workload, rows))
    size = sum(map(len, stream)) / rows
    checked = loaded = float("inf")
    for _ in range(rounds):
        loaded = min(loaded, cpu_seconds(load_all, stream))
        checked = min(checked, cpu_seconds(check_all, stream))
    sys.stdout.write(
        f"{workload.name:34s} {size:8,.0f} {rows / checked:12,.0f} {rows / loaded:12,.0f} {loaded / checked:8.2f}\n"
    )


def measure_memory(workload: Workload, rows: int) -> None:
    """Run once while every allocation is traced; the stream is made on the way and not kept."""
    checker, tally = Checker(RULES), Tally()
    tracemalloc.start()
    for _ in scan(chunks(workload, rows), checker, tally):
        pass
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sys.stdout.write(
        f"{workload.name:34s} {rows:12,d} {tally.errors.total():10,d} {peak / rows:12.1f} {held / rows:12.1f}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    workloads = (
        Workload("plain chat", plain),
        Workload("with line breaks and quotes", escaped),
        Workload("content parts and a schema", structured),
        Workload("every tenth bad", faulty),
    )
    sys.stdout.write(f"{'rows':34s} {'bytes':>8s} {'checked/s':>12s} {'json.loads/s':>12s} {'ratio':>8s}\n")
    for workload in workloads:
        measure_speed(workload, arguments.rows, arguments.rounds)
    if arguments.memory_rows:
        columns = f"{'bad':>10s} {'peak bytes/row':>12s} {'held bytes/row':>12s}"
        sys.stdout.write(f"\n{'memory':34s} {'rows':>12s} {columns}\n")
        measure_memory(workloads[-1], arguments.memory_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
