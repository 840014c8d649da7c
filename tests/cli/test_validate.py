"""``vllm-batch validate`` as a user starts it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.support.commands import vllm_batch
from tests.support.runs import chat, write_lines


def test_a_good_file_can_run(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [chat("a"), "", chat("b")])
    code, out, _ = vllm_batch("validate", tmp_path / "in.jsonl")
    assert (code, out) == (0, f"{tmp_path}/in.jsonl: 3 lines, 2 requests, all can run\n")


def test_bad_lines_are_listed_and_only_strict_refuses_the_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [chat("a"), "{", chat("b", model="other")])
    code, out, _ = vllm_batch("validate", tmp_path / "in.jsonl", "--model", "m")
    assert code == 0
    assert "2 of 3 requests are bad (invalid_json 1, model_mismatch 1)" in out
    assert "1 of 3 requests can run" in out
    assert vllm_batch("validate", tmp_path / "in.jsonl", "--bad-lines", "strict").code == 65


def test_json_has_every_verdict_for_programs(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [chat("a"), "{", chat("a")])
    code, out, _ = vllm_batch("validate", tmp_path / "in.jsonl", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["lines"], found["runnable"]) == (3, 1)
    assert [(error["line"], error["custom_id"], error["code"]) for error in found["errors"]] == [
        (2, None, "invalid_json"),
        (3, "a", "duplicate_custom_id"),
    ]


def test_a_fault_of_the_whole_file_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    code, out, _ = vllm_batch("validate", tmp_path / "in.jsonl", "--json")
    assert (code, json.loads(out)) == (
        65,
        {
            "lines": 0,
            "runnable": 0,
            "errors": [
                {
                    "line": None,
                    "custom_id": None,
                    "code": "empty_file",
                    "message": "there is no request in the input",
                }
            ],
        },
    )


def test_a_compressed_file_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(chat("a")).encode())
    (tmp_path / "in.jsonl.gz").write_bytes(packed)
    assert vllm_batch("validate", tmp_path / "in.jsonl.gz").code == 0
    (tmp_path / "in.jsonl.gz").write_bytes(packed[:-9])
    code, out, _ = vllm_batch("validate", tmp_path / "in.jsonl.gz")
    assert code == 65
    assert "truncated" in out


def test_a_missing_file_is_exit_69(tmp_path: Path) -> None:
    code, _, err = vllm_batch("validate", tmp_path / "nothing.jsonl")
    assert code == 69
    assert "nothing.jsonl" in err
