"""Embeddings on real vLLM."""

from __future__ import annotations

import json
import math
from pathlib import Path

from openai.types import CreateEmbeddingResponse

from tests.engine.conftest import ENVIRONMENT
from tests.support.commands import vllm_batch
from tests.support.runs import chat, read_rows, write_lines

TEXTS = ("A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell today.")


def test_embeddings_of_real_sentences(tmp_path: Path, minilm: str) -> None:
    lines = [
        {"custom_id": f"e{number}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for number, text in enumerate(TEXTS)
    ]
    write_lines(tmp_path / "in.jsonl", [*lines, chat("chat", "hello")])
    done = vllm_batch(
        *("run", "-i", "in.jsonl", "-o", "out/", "--model", minilm, "--served-model-name", "minilm"),
        *("--allowed-failures", "1", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        seconds=850,
    )
    assert done.code == 0, done.err[-3000:]
    rows = read_rows(tmp_path / "out" / "output.jsonl")
    vectors = [CreateEmbeddingResponse.model_validate(row["response"]["body"]).data[0].embedding for row in rows]
    assert [row["custom_id"] for row in rows] == ["e0", "e1", "e2"]
    assert [len(vector) for vector in vectors] == [384, 384, 384]

    def likeness(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    assert likeness(vectors[0], vectors[1]) > likeness(vectors[0], vectors[2]) + 0.2
    (refused,) = read_rows(tmp_path / "out" / "errors.jsonl")
    assert (refused["custom_id"], refused["error"]["code"]) == ("chat", "unsupported_url")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["usage"]["completion_tokens"], manifest["usage"]["prompt_tokens"] > 15) == (0, True)
