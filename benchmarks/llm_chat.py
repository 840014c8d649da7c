"""Rows of a batch file through vLLM's offline ``LLM.chat``: the rate that the engine itself allows.

    python -m benchmarks.llm_chat INPUT MODEL RESULT

Writes ``{"seconds": …, "rows": …}`` to RESULT, without the engine's load.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(source: str, model: str, result: str) -> None:
    from vllm import LLM, SamplingParams

    bodies = [json.loads(line)["body"] for line in Path(source).read_text().splitlines()]
    llm = LLM(model=model, enforce_eager=True, gpu_memory_utilization=0.3, max_model_len=2048)
    started = time.monotonic()
    llm.chat(
        [body["messages"] for body in bodies],
        [SamplingParams(temperature=0, max_tokens=body["max_tokens"]) for body in bodies],
    )
    Path(result).write_text(json.dumps({"seconds": time.monotonic() - started, "rows": len(bodies)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
