"""Inputs that the worker can't read itself are copied into the run folder, in the pass that checks them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard

from tests.support.bench import Bench, exits  # isort: skip  before Airflow

from airflow_vllm_batch.arguments import StageInput
from airflow_vllm_batch.contract import InputFile
from airflow_vllm_batch.contract.spec import Limits
from airflow_vllm_batch.input_copy import wanted

INPUTS = [
    InputFile(uri="s3://bucket/a.jsonl"),
    InputFile(uri="/data/b.jsonl"),
    InputFile(uri="https://host/c.jsonl"),
    InputFile(uri="file:///data/d.jsonl"),
]


@pytest.mark.parametrize(
    ("stage", "worker_reads_them", "expected"),
    [
        ("auto", False, [1, 2, 3]),
        ("auto", True, []),
        ("always", True, [0, 1, 2, 3]),
        ("never", False, []),
    ],
)
def test_what_is_copied(stage: StageInput, worker_reads_them: bool, expected: list[int]) -> None:
    assert wanted(stage, INPUTS, worker_reads_them=worker_reads_them) == expected


def copied(bench: Bench) -> bytes:
    packed = bench.output / "_vllm_batch" / "1" / "input" / "00.jsonl.zst"
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed.read_bytes())


async def staged(bench: Bench) -> list[str | None]:
    return [source.staged for run in bench.worker.runs for source in (await run.spec()).inputs]


@pytest.mark.parametrize("preflight", ["full", "sample", "off"])
async def test_the_copy_has_every_byte_however_much_of_the_input_is_checked(tmp_path: Path, preflight: str) -> None:
    bench = Bench(tmp_path)
    await bench.run(plan={"stage_input": "auto", "preflight": preflight})
    assert copied(bench) == bench.input.read_bytes()
    assert await staged(bench) == ["_vllm_batch/1/input/00.jsonl.zst"]


async def test_a_trial_of_one_row_still_copies_the_whole_input(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.input.write_bytes(bench.input.read_bytes() * 2000)
    await bench.run(plan={"stage_input": "always"}, limits=Limits(limit=1))
    assert copied(bench) == bench.input.read_bytes()


async def test_a_compressed_input_is_copied_as_what_it_holds(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    plain = bench.input.read_bytes()
    bench.input = tmp_path / "in.jsonl.gz"
    bench.input.write_bytes(gzip.compress(plain))
    await bench.run(plan={"stage_input": "auto"})
    assert copied(bench) == plain


async def test_nothing_is_copied_for_a_worker_that_reads_the_source(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.worker.reads_inputs = True
    await bench.run(plan={"stage_input": "auto"})
    assert await staged(bench) == [None]
    assert not (bench.output / "_vllm_batch" / "1" / "input").exists()


async def test_a_retry_keeps_the_copy_of_an_unchanged_input_and_makes_anew_what_is_gone_or_changed(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    plan = {"stage_input": "auto"}
    await bench.fails(script=exits(75), plan=plan)
    copy = bench.output / "_vllm_batch" / "1" / "input" / "00.jsonl.zst"
    made = copy.stat().st_mtime_ns
    await bench.fails(script=exits(75), plan=plan)
    assert copy.stat().st_mtime_ns == made
    copy.unlink()
    await bench.fails(script=exits(75), plan=plan)
    assert copied(bench) == bench.input.read_bytes()
    bench.input.write_bytes(bench.input.read_bytes().replace(b'"a"', b'"z"'))
    await bench.fails(script=exits(75), plan=plan)
    assert copied(bench) == bench.input.read_bytes()
    assert await staged(bench) == ["_vllm_batch/1/input/00.jsonl.zst"] * 4
