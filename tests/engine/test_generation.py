"""Chat, completions and responses on real vLLM, from the command line to the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.engine.conftest import ENGINE_FLAGS, ENVIRONMENT
from tests.support.commands import Done, environment, vllm_batch
from tests.support.runs import chat, read_rows, write_lines

GREEDY = {"temperature": 0, "max_tokens": 16}
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Name one colour of the rainbow.",
    "Is water wet? Answer yes or no.",
)

CITY = {
    "name": "city",
    "schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


REQUESTS = [
    *(chat(f"chat-{number}", question, **GREEDY) for number, question in enumerate(QUESTIONS)),
    request("completion", "/v1/completions", prompt="Once upon a time", **GREEDY),
    request("three", "/v1/completions", prompt="The sky is", n=3, temperature=1.0, seed=1, max_tokens=4),
    request("response", "/v1/responses", input="What is the capital of France?", temperature=0, max_output_tokens=16),
    chat("json", "Name a city.", **GREEDY, response_format={"type": "json_schema", "json_schema": CITY}),
    chat("too-long", "word " * 2000, **GREEDY),
    chat("other-model", "hi", model="other"),
    request("embedding", "/v1/embeddings", input="hello"),
]


class Ran(NamedTuple):
    done: Done
    folder: Path

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["custom_id"]: row for row in read_rows(self.folder / "out" / "output.jsonl")}

    @property
    def errors(self) -> dict[str, dict[str, Any]]:
        return {row["custom_id"]: row for row in read_rows(self.folder / "out" / "errors.jsonl")}

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "out" / "manifest.json").read_text()))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, smollm: str) -> Ran:
    """Load the model once for every test of this module."""
    folder = tmp_path_factory.mktemp("generation")
    write_lines(folder / "in.jsonl", REQUESTS)
    arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", smollm, "--served-model-name", "smol")
    done = vllm_batch(*arguments, "--allowed-failures", "3", *ENGINE_FLAGS, cwd=folder, env=ENVIRONMENT, seconds=850)
    return Ran(done, folder)


def test_the_run_passes_with_the_failures_it_may_have(ran: Ran) -> None:
    assert ran.done.code == 0, ran.done.err[-3000:]
    assert "PASS: 3 of 11 rows failed, 3 allowed" in ran.done.out
    assert list(ran.rows) == [row["custom_id"] for row in REQUESTS[:8]]
    assert list(ran.errors) == ["too-long", "other-model", "embedding"]


def test_the_model_knows_the_capital_of_france(ran: Ran) -> None:
    answer = ChatCompletion.model_validate(ran.rows["chat-0"]["response"]["body"])
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "smol"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_every_answer_is_one_that_openais_own_models_read(ran: Ran) -> None:
    for custom_id in ("chat-0", "chat-1", "chat-2", "chat-3", "json"):
        ChatCompletion.model_validate(ran.rows[custom_id]["response"]["body"])
    assert Completion.model_validate(ran.rows["completion"]["response"]["body"]).choices[0].finish_reason == "length"
    response = Response.model_validate(ran.rows["response"]["response"]["body"])
    assert "Paris" in response.output_text
    for row in ran.rows.values():
        assert (row["response"]["status_code"], row["error"]) == (200, None)
        assert row["id"].startswith("vllm-")


def test_all_choices_of_a_row_are_in_its_one_result(ran: Ran) -> None:
    assert [choice["index"] for choice in ran.rows["three"]["response"]["body"]["choices"]] == [0, 1, 2]


def test_json_that_was_asked_for_follows_its_schema(ran: Ran) -> None:
    answer = json.loads(ran.rows["json"]["response"]["body"]["choices"][0]["message"]["content"])
    assert answer["city"] in {"Rome", "Oslo"}


def test_what_the_engine_refuses_keeps_its_reply_and_has_a_reason(ran: Ran) -> None:
    refused = ran.errors["too-long"]
    assert refused["response"]["status_code"] == 400
    assert "512" in refused["response"]["body"]["error"]["message"]
    assert refused["error"]["code"] == "context_length_exceeded"


def test_what_the_model_can_not_do_is_never_sent(ran: Ran) -> None:
    refused = ran.errors["embedding"]
    assert (refused["response"], refused["error"]["code"]) == (None, "unsupported_url")
    assert "/v1/embeddings" in refused["error"]["message"]
    assert (ran.errors["other-model"]["response"], ran.errors["other-model"]["error"]["code"]) == (
        None,
        "model_mismatch",
    )


def test_the_manifest_says_what_ran_with_what(ran: Ran, smollm: str) -> None:
    manifest = ran.manifest
    assert manifest["counts"] == {"rows": 11, "by_outcome": {"succeeded": 8, "failed": 1, "invalid": 2}}
    assert manifest["versions"]["vllm"].startswith("0.")
    assert (manifest["model"]["name"], manifest["model"]["served_names"]) == (smollm, ["smol"])
    assert manifest["model"]["fingerprint"].startswith("path:")
    assert manifest["engine"]["max_model_len"] == 512
    # The defaults of the offline LLM class on a CPU, not the 128 of a server.
    assert manifest["engine"]["max_num_seqs"] == 256
    assert manifest["usage"]["prompt_tokens"] > 100
    assert manifest["usage"]["cached_prompt_tokens"] is not None
    assert manifest["timing"]["engine_start"] > 0


def test_greedy_answers_are_those_of_run_batch(ran: Ran, tmp_path: Path, smollm: str) -> None:
    write_lines(tmp_path / "in.jsonl", [{**row, "body": {**row["body"], "model": "smol"}} for row in REQUESTS[:4]])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.run_batch"),
            *("-i", "in.jsonl", "-o", "theirs.jsonl", "--model", smollm, "--served-model-name", "smol"),
            *ENGINE_FLAGS,
        ],
        cwd=tmp_path,
        env=environment(ENVIRONMENT),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = read_rows(tmp_path / "theirs.jsonl")
    said = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in theirs}
    ours = {
        row["custom_id"]: ran.rows[row["custom_id"]]["response"]["body"]["choices"][0]["message"]["content"]
        for row in REQUESTS[:4]
    }
    assert ours == said
