"""The order in which rows run: a walk of the tree of their prompts' prefixes."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_vllm_batch.runner.ordering import BLOCK_CHARACTERS, PrefixFile, block_digests, read_prompt

CHAT = "/v1/chat/completions"


def order(folder: Path, texts: list[str], tokens: list[int] | None = None) -> list[int]:
    prefixes = PrefixFile(folder / "prefixes")
    for number, text in enumerate(texts):
        prefixes.add(block_digests(text), tokens[number] if tokens else 0)
    found = list(prefixes.order(range(len(texts))))
    prefixes.close()
    return found


def block(name: str) -> str:
    """Return one whole block of text that no other name has."""
    return (name * BLOCK_CHARACTERS)[:BLOCK_CHARACTERS]


def hits(texts: list[str], sequence: list[int], cache_blocks: int) -> int:
    """Count the blocks that a cache of so many blocks, which drops the one that was used longest ago, still has."""
    cache: OrderedDict[str, None] = OrderedDict()
    found = 0
    for row in sequence:
        text = texts[row]
        for end in range(BLOCK_CHARACTERS, len(text) + 1, BLOCK_CHARACTERS):
            prefix = text[:end]
            found += prefix in cache
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > cache_blocks:
            cache.popitem(last=False)
    return found


def documents_and_questions(documents: int, questions: int, seed: int = 1) -> list[str]:
    """Return shuffled prompts: one long system prompt, then a document, then a question of its own."""
    system = "".join(f"rule {number} " for number in range(500))
    texts = [
        system + "".join(f"document {document} sentence {number} " for number in range(120)) + f"question {question}?"
        for document in range(documents)
        for question in range(questions)
    ]
    random.Random(seed).shuffle(texts)
    return texts


def test_shuffled_questions_about_documents_are_as_good_as_sorted_ones(tmp_path: Path) -> None:
    texts = documents_and_questions(documents=20, questions=10)
    sorted_by_hand = sorted(range(len(texts)), key=texts.__getitem__)
    best = hits(texts, sorted_by_hand, cache_blocks=30)
    assert hits(texts, order(tmp_path, texts), cache_blocks=30) == best
    assert hits(texts, list(range(len(texts))), cache_blocks=30) < best


def test_an_input_in_the_best_order_stays_as_it_is(tmp_path: Path) -> None:
    texts = documents_and_questions(documents=6, questions=5)
    ordered = [texts[row] for row in sorted(range(len(texts)), key=texts.__getitem__)]
    assert order(tmp_path, ordered) == list(range(30))


def test_rows_without_a_shared_prefix_keep_the_order_of_the_input(tmp_path: Path) -> None:
    assert order(tmp_path, [block(letter) for letter in "qwertyuiop"]) == list(range(10))
    assert order(tmp_path, ["short", "", "also short"]) == [0, 1, 2]


def test_groups_come_in_the_order_of_their_first_row_at_every_depth(tmp_path: Path) -> None:
    a, b = block("a"), block("b")
    texts = [b + block("y"), a + block("p"), b + block("x"), a + block("q"), b + block("y"), a + block("p"), b, b + "?"]
    assert order(tmp_path, texts) == [0, 4, 2, 6, 7, 1, 5, 3]


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4).map("".join), min_size=1, max_size=40), st.data())
@settings(deadline=None)
def test_whatever_the_prompts_every_row_runs_once_and_shared_prefixes_stand_together(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
) -> None:
    texts = ["".join(block(name) for name in word) for word in names]
    found = order(tmp_path_factory.mktemp("order"), texts)
    assert sorted(found) == list(range(len(texts)))
    for length in range(1, 5):
        prefixes = [names[row][:length] for row in found if len(names[row]) >= length]
        seen: list[str] = []
        for prefix in prefixes:
            if not seen or seen[-1] != prefix:
                # Rows that end before are not in this list, so a prefix may only come back for two rows of a pair.
                assert seen.count(prefix) == 0, (names, found)
                seen.append(prefix)


def test_a_lone_long_row_does_not_run_alone_at_the_end(tmp_path: Path) -> None:
    tokens = [16] * 40
    tokens[38] = 4000
    assert order(tmp_path, ["x"] * 40, tokens) == [38, *range(38), 39]
    # Long rows elsewhere, and rows that are all long, stay.
    assert order(tmp_path, ["x"] * 40, [4000] * 40) == list(range(40))
    assert order(tmp_path, ["x"] * 40, [4000, *[16] * 39]) == list(range(40))


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, "\n\n\n<user>hi"),
        (
            CHAT,
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            "m\n\n\n<user>hi",
        ),
        (
            CHAT,
            {"tools": [{"a": 1}], "messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]},
            '\n\n[{"a":1}]\n<assistant>[1]',
        ),
        ("/v1/completions", {"prompt": "once"}, "\nonce"),
        ("/v1/completions", {"prompt": [1, 2, 3]}, "\n[1,2,3]"),
        ("/v1/responses", {"instructions": "be brief", "input": "hi"}, "\n\nbe brief\nhi"),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}, "\n\n\n<user>hi"),
        ("/v1/embeddings", {"input": "hi"}, ""),
        ("/v1/score", {"text_1": "hi", "text_2": "ho"}, ""),
    ],
)
def test_the_text_begins_as_the_prompt_does(endpoint: str, body: dict[str, Any], text: str) -> None:
    assert read_prompt(endpoint, json.dumps(body).encode()).text == text


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 0),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_output_tokens": 9}, 9),
        ({"max_tokens": None}, 0),
        ({"min_tokens": 3}, 0),
    ],
)
def test_the_most_tokens_a_row_may_take(body: dict[str, Any], tokens: int) -> None:
    assert read_prompt(CHAT, json.dumps(body).encode()).most_tokens == tokens
