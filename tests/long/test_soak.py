"""Twenty thousand rows against a server that refuses, drops and hangs, through three sudden deaths of the runner."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from aiohttp import web

from airflow_vllm_batch.runner.segments import unpack
from tests.support.commands import start
from tests.support.openai_server import OpenAIServer
from tests.support.runs import chat, read_rows, write_lines
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROWS = 20_000
DEATHS = 3


class Moods:
    """What the server does: one request in twenty gets an error, some lose their connection, a few never an answer."""

    def __init__(self) -> None:
        self._dice = random.Random(7)
        self.asked: Counter[str] = Counter()

    def __call__(self, body: dict[str, Any], before: int) -> web.Response | None:
        self.asked[body["messages"][-1]["content"]] += 1
        roll = self._dice.random()
        if roll < 0.05:
            return web.json_response({"error": {"message": "try again"}}, status=500)
        if roll < 0.07:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0"})
        if roll < 0.08:
            raise ConnectionResetError("dropped")
        if roll < 0.081:
            raise asyncio.CancelledError  # the handler ends without an answer, and the connection hangs up
        return None


def durable_rows(folder: Path) -> set[str]:
    """Return the ids of all rows that segments hold."""
    found = set()
    for path in (folder / "_vllm_batch" / "1" / "segments").glob("*.zst"):
        try:
            _, rows = unpack(path.read_bytes())
        except (ValueError, zstandard.ZstdError):
            continue
        found |= {json.loads(line)["custom_id"] for line in rows.split(b"\n") if line}
    return found


def wait_for_rows(folder: Path, *, more_than: int) -> None:
    wait_until(lambda: len(durable_rows(folder)) > more_than, seconds=300, what=f"{more_than} durable rows")


def test_no_finished_row_is_lost_or_asked_for_again(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", f"p{number}") for number in range(ROWS)])
    moods = Moods()
    with OpenAIServer(script=moods) as server:
        command = (
            *("airflow_vllm_batch.cli", "run", "-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out/", "--model", "m"),
            *("--server-url", server.url, "--row-retries", "20", "--row-timeout", "5", "--max-in-flight", "64"),
            *("--checkpoint-seconds", "0.5"),
        )
        deaths: list[tuple[set[str], Counter[str]]] = []
        for death in range(1, DEATHS + 1):
            runner = start(*command)
            wait_for_rows(tmp_path / "out", more_than=ROWS * death // (DEATHS + 2))
            os.killpg(runner.pid, signal.SIGKILL)
            runner.wait(timeout=30)
            deaths.append((durable_rows(tmp_path / "out"), moods.asked.copy()))
        runner = start(*command)
        output, _ = runner.communicate(timeout=600)
        assert runner.returncode == 0, output[-3000:]
    for durable, asked_before in deaths:
        assert len(durable) > ROWS // 10
        prompts = {f"p{custom_id[1:]}" for custom_id in durable}
        assert {prompt for prompt in prompts if moods.asked[prompt] > asked_before[prompt]} == set()
    rows = read_rows(tmp_path / "out" / "output.jsonl")
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(ROWS)]
    assert len(moods.asked) == ROWS
