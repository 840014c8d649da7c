"""Against vLLM's own run_batch, on the CPU: prompt tokens that the engine has to compute, and CPU time a request.

    python benchmarks/engine.py [--real]

Token counts are exact and free of noise, so the tiny model serves for them. CPU time is that of the front-end process
(user and system), as the difference between a long and a short run. ``--real`` adds rows per second with
SmolLM2-135M, against run_batch and ``LLM.chat``; that takes about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Taken, run, table

TINY = str(ROOT / ".models" / "tiny-llama")
SMOL = str(ROOT / ".models" / "smollm2-135m-instruct")
FLAGS = [
    "--served-model-name",
    "m",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "0.3",
    "--enable-prompt-tokens-details",
]
DOCUMENTS, QUESTIONS = 40, 20
SHORT, LONG = 300, 3_000

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
)
SYLLABLES = ("bar", "lin", "tes", "vok", "mur", "dan", "sol", "pre", "gal", "nim", "tor", "qua", "zel", "hib")
RARE = 0.3


class Measured(NamedTuple):
    taken: Taken
    prompt_tokens: int
    computed_tokens: int
    run_seconds: float | None
    """Without the engine's load, where the program tells."""


def words(dice: random.Random, count: int) -> str:
    """Return words of which a quarter are rare ones: 1.5 tokens a word, as in text about something."""
    return " ".join(
        dice.choice(SYLLABLES) + dice.choice(SYLLABLES) if dice.random() < RARE else dice.choice(WORDS)
        for _ in range(count)
    )


def chat(custom_id: str, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def documents() -> list[dict[str, Any]]:
    """Return 800 rows: 40 documents of 300 words with 20 questions each under one system prompt of 500 words."""
    dice = random.Random(1)
    system = {"role": "system", "content": words(dice, 500)}
    texts = [words(dice, 300) for _ in range(DOCUMENTS)]
    return [
        chat(
            f"d{document}-q{question}",
            [system, {"role": "user", "content": f"{text}\n\nQuestion {question}: {words(dice, 12)}?"}],
            16,
        )
        for document, text in enumerate(texts)
        for question in range(QUESTIONS)
    ]


def short_prompts(count: int) -> list[dict[str, Any]]:
    dice = random.Random(2)
    return [chat(f"s{row}", [{"role": "user", "content": words(dice, 60)}], 1) for row in range(count)]


def write(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def cached(path: Path) -> tuple[int, int]:
    """Return prompt tokens and how many of them were cached, as the answers say."""
    prompt = hits = 0
    for line in path.read_text().splitlines():
        usage = json.loads(line)["response"]["body"]["usage"]
        prompt += usage["prompt_tokens"]
        hits += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return prompt, hits


def ours(folder: Path, rows: Iterable[dict[str, Any]], model: str, *more: str) -> Measured:
    write(folder, rows)
    command = ["airflow_vllm_batch.cli", "run", "-i", "in.jsonl", "-o", "out/", "--model", model, *FLAGS, *more]
    taken = run(command, folder)
    prompt, hits = cached(folder / "out" / "output.jsonl")
    timing = json.loads((folder / "out" / "manifest.json").read_text())["timing"]
    return Measured(taken, prompt, prompt - hits, timing["run"])


def run_batch(folder: Path, rows: Iterable[dict[str, Any]], model: str, *more: str) -> Measured:
    write(folder, rows)
    command = [
        "vllm.entrypoints.openai.run_batch",
        "-i",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--model",
        model,
        *FLAGS,
        *more,
    ]
    taken = run(command, folder)
    prompt, hits = cached(folder / "out.jsonl")
    return Measured(taken, prompt, prompt - hits, None)


def prefix_cache(scratch: Path) -> None:
    rows = documents()
    shuffled = rows[:]
    random.Random(3).shuffle(shuffled)
    bounded = ("--max-model-len", "2048", "--num-gpu-blocks-override", "128")
    theirs = run_batch(scratch / "theirs", shuffled, TINY, *bounded)
    mine = ours(scratch / "ours", shuffled, TINY, *bounded)
    by_hand = ours(scratch / "sorted", rows, TINY, *bounded, "--order", "input")
    table(
        f"{len(rows)} shuffled rows over {DOCUMENTS} documents, KV cache of 128 blocks: prompt tokens to compute",
        [
            ("run_batch", f"{theirs.computed_tokens:,} of {theirs.prompt_tokens:,}", ""),
            ("sorted by hand", f"{by_hand.computed_tokens:,}", ""),
            ("ours", f"{mine.computed_tokens:,}", ""),
            ("ours against sorted", f"{mine.computed_tokens / by_hand.computed_tokens:.3f}", "≤ 1.02"),
            ("run_batch against ours", f"{theirs.computed_tokens / mine.computed_tokens:.2f}", ""),
        ],
    )


def front_end(scratch: Path) -> None:
    figures: dict[str, float] = {}
    for name, program in (("run_batch", run_batch), ("ours", ours)):
        short = program(scratch / f"{name}-short", short_prompts(SHORT), TINY, "--max-model-len", "512")
        long = program(scratch / f"{name}-long", short_prompts(LONG), TINY, "--max-model-len", "512")
        figures[name] = (long.taken.cpu_seconds - short.taken.cpu_seconds) / (LONG - SHORT) * 1e3
    table(
        f"front-end CPU a request, {LONG:,} requests of 60 words, max_tokens 1",
        [
            ("run_batch", f"{figures['run_batch']:.2f} ms", ""),
            ("ours", f"{figures['ours']:.2f} ms", "≤ 1.00 ms, and below run_batch's"),
        ],
    )


def mixed(count: int) -> list[dict[str, Any]]:
    """Return rows that share no prefix, with prompts of 20 to 200 words and answers of 4 to 32 tokens."""
    dice = random.Random(4)
    return [
        chat(
            f"m{row}",
            [{"role": "user", "content": f"{dice.random()} {words(dice, dice.randint(20, 200))}"}],
            dice.randint(4, 32),
        )
        for row in range(count)
    ]


def without_prefixes(scratch: Path) -> None:
    rows, flags = mixed(400), ("--max-model-len", "2048")
    load = run_batch(scratch / "mixed-load", rows[:1], SMOL, *flags).taken.seconds
    theirs = run_batch(scratch / "mixed-theirs", rows, SMOL, *flags).taken.seconds - load
    mine = ours(scratch / "mixed-ours", rows, SMOL, *flags).run_seconds or 0.0
    run(["benchmarks.llm_chat", "in.jsonl", SMOL, "llm.json"], scratch / "mixed-ours")
    offline = json.loads((scratch / "mixed-ours" / "llm.json").read_text())["seconds"]
    table(
        f"{len(rows)} rows without shared prefixes, mixed lengths, SmolLM2-135M, engine load taken off",
        [
            ("run_batch", f"{len(rows) / theirs:.2f} rows/s", ""),
            ("LLM.chat", f"{len(rows) / offline:.2f} rows/s", ""),
            ("ours", f"{len(rows) / mine:.2f} rows/s", ""),
            ("ours against run_batch", f"{theirs / mine:.2f} ×", "≥ 1.0 ×"),
            ("ours against LLM.chat", f"{offline / mine:.2f} ×", "≥ 0.98 ×"),
        ],
    )


def real_model(scratch: Path) -> None:
    rows = documents()
    random.Random(3).shuffle(rows)
    bounded = ("--max-model-len", "2048", "--num-gpu-blocks-override", "128")
    load = run_batch(scratch / "real-load", rows[:1], SMOL, *bounded).taken.seconds
    theirs = run_batch(scratch / "real-theirs", rows, SMOL, *bounded).taken.seconds - load
    mine = ours(scratch / "real-ours", rows, SMOL, *bounded).run_seconds or 0.0
    table(
        f"the same {len(rows)} rows on SmolLM2-135M, engine load taken off",
        [
            ("run_batch", f"{len(rows) / theirs:.2f} rows/s", ""),
            ("ours", f"{len(rows) / mine:.2f} rows/s", ""),
            ("ours against run_batch", f"{theirs / mine:.2f} ×", "≥ 2.5 ×"),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="also the real model (slow)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prefix_cache(scratch)
        front_end(scratch)
        if arguments.real:
            without_prefixes(scratch)
            real_model(scratch)


if __name__ == "__main__":
    main()
