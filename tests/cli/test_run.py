"""``vllm-batch run`` and ``status`` as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.commands import vllm_batch
from tests.support.openai_server import OpenAIServer
from tests.support.runs import chat, read_rows, write_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in.jsonl", [chat("a", "one"), chat("b", "two"), chat("c", "three", model="other")])
    return tmp_path


def echo(folder: Path, *more: str) -> tuple[int, str, str]:
    return vllm_batch("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--engine", "echo", *more, cwd=folder)


def test_a_run_says_what_came_out_and_where_it_lies(folder: Path) -> None:
    code, out, err = echo(folder, "--allowed-failures", "1")
    assert code == 0
    assert out.splitlines()[0] == "PASS: 1 of 3 rows failed, 1 allowed (allowed_failures=1)"
    assert "rows     3 (2 succeeded, 1 invalid)" in out
    assert f"output   {folder}/out/output.jsonl" in out
    assert "model_mismatch" in out
    assert [row["custom_id"] for row in read_rows(folder / "out" / "output.jsonl")] == ["a", "b"]
    assert [row["custom_id"] for row in read_rows(folder / "out" / "errors.jsonl")] == ["c"]
    assert "3 of 3 rows (100.0%)" in err


def test_more_failures_than_allowed_is_exit_3_and_everything_is_written(folder: Path) -> None:
    code, out, err = echo(folder)
    assert code == 3
    assert out.startswith("FAIL: 1 of 3 rows failed, 0 allowed")
    assert "exit 3 (too many failed)" in err
    assert len(read_rows(folder / "out" / "output.jsonl")) == 2


def test_the_same_command_on_a_finished_run_does_nothing_and_judges_anew(folder: Path) -> None:
    assert echo(folder).code == 3  # type: ignore[attr-defined]
    before = (folder / "out" / "output.jsonl").stat().st_mtime_ns
    code, out, _ = echo(folder, "--allowed-failures", "0.5")
    assert (code, out.splitlines()[0]) == (
        0,
        "The run is finished; nothing was started (--restart runs every row anew).",
    )
    assert "PASS: 1 of 3 rows failed, 1 allowed (allowed_failures=0.5 of 3)" in out
    assert (folder / "out" / "output.jsonl").stat().st_mtime_ns == before
    verdict = json.loads((folder / "out" / "manifest.json").read_text())["verdict"]
    assert [judgement["passed"] for judgement in (verdict["overall"], *verdict["earlier"])] == [True, False]


def test_restart_runs_every_row_anew_in_a_new_generation(folder: Path) -> None:
    echo(folder)
    code, _, _ = echo(folder, "--restart", "--allowed-failures", "1")
    assert code == 0
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert (manifest["generation"], manifest["rows_reused"]) == (2, 0)


def test_the_folder_of_another_run_is_refused_until_it_is_taken_over(folder: Path) -> None:
    echo(folder, "--allowed-failures", "1")
    write_lines(folder / "other.jsonl", [chat("z", "new")])
    other = ("run", "-i", "other.jsonl", "-o", "out/", "--model", "m", "--engine", "echo")
    code, _, err = vllm_batch(*other, cwd=folder)
    assert code == 64
    assert "belongs to another run" in err
    assert [row["custom_id"] for row in read_rows(folder / "out" / "output.jsonl")] == ["a", "b"]
    assert vllm_batch(*other, "--overwrite", cwd=folder).code == 0
    assert [row["custom_id"] for row in read_rows(folder / "out" / "output.jsonl")] == ["z"]


def test_files_of_somebody_else_are_not_written_over(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "output.jsonl").write_text("precious")
    code, _, err = echo(folder)
    assert code == 64
    assert "output.jsonl exists, but no run of ours owns the folder" in err
    assert (folder / "out" / "output.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-i", "missing.jsonl", "-o", "out/"], 69, "missing.jsonl"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], 64, "would be overwritten"),
        (["-i", "out/output.jsonl", "-o", "out/"], 64, "would be overwritten"),
        (["-i", "in.jsonl", "-o", "out/", "--allowed-failures", "1.5"], 64, "must lie between 0.0 and 1.0"),
        (["-i", "in.jsonl", "-o", "out/", "--max-model-len", "5"], 64, "--max-model-len is not a flag of ours"),
        (["-i", "in.jsonl", "-o", "out/", "--row-retries", "-1"], 64, "--row-retries"),
        (["-i", "in.jsonl", "-o", "http://127.0.0.1:9/out"], 64, "needs --state"),
        (["-i", "in.jsonl", "-o", "out/", "--state", "s/"], 64, "--state goes with a one-file output"),
        (["-i", "in.jsonl", "-o", "out/", "--store", "nowhere.json"], 64, "nowhere.json"),
        (["-i", "ftp://host/in.jsonl", "-o", "out/"], 64, "ftp"),
        (["-o", "out/"], 64, "-i/--input"),
        (["-i", "in.jsonl", "-o", "out/", "stray"], 64, "unexpected argument 'stray'"),
    ],
)
def test_bad_arguments_are_named_and_leave_no_trace(folder: Path, arguments: list[str], code: int, words: str) -> None:
    done = vllm_batch("run", "--model", "m", "--engine", "echo", *arguments, cwd=folder)
    assert (done.code, words in done.err, "Traceback" in done.err) == (code, True, False), done.err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "there is no request in the input"), (b"\x1f\x8b\x08\x00 not text at all", "gzip data")],
)
def test_a_file_that_is_no_batch_file_is_exit_65(folder: Path, content: bytes, words: str) -> None:
    (folder / "in.jsonl").write_bytes(content)
    code, _, err = echo(folder)
    assert code == 65
    assert words in err
    (attempt,) = (folder / "out" / "_vllm_batch" / "1" / "attempts").glob("*.json")
    assert json.loads(attempt.read_text())["exit_code"] == 65


def test_strict_names_the_bad_lines_and_starts_nothing(folder: Path) -> None:
    code, _, err = echo(folder, "--bad-lines", "strict")
    assert code == 65
    assert "1 of 3 requests are bad" in err
    assert "line 3" in err
    assert not (folder / "out" / "output.jsonl").exists()


def test_an_output_that_can_not_be_written_is_exit_69(folder: Path) -> None:
    (folder / "out").write_text("a file")
    code, _, err = echo(folder)
    assert code == 69
    assert str(folder / "out") in err


def test_a_model_that_is_not_there_is_exit_78_before_vllm_is_loaded(folder: Path) -> None:
    code, _, err = vllm_batch("run", "-i", "in.jsonl", "-o", "out/", "--model", "./nowhere", cwd=folder)
    assert code == 78
    assert "no such file or folder" in err


def test_one_file_and_its_state_beside_it(folder: Path) -> None:
    arguments = ("run", "-i", "in.jsonl", "-o", "all.jsonl", "--model", "m", "--engine", "echo")
    assert vllm_batch(*arguments, cwd=folder).code == 3
    assert [row["custom_id"] for row in read_rows(folder / "all.jsonl")] == ["a", "b", "c"]
    assert (folder / "all.vllm_batch" / "manifest.json").exists()
    code, out, _ = vllm_batch("status", "all.jsonl", cwd=folder)
    assert code == 0
    assert f"all      {folder}/all.jsonl" in out


def test_status_tells_how_a_run_ended(folder: Path) -> None:
    echo(folder)
    code, out, _ = vllm_batch("status", "out", "--json", cwd=folder)
    found = json.loads(out)
    assert (code, found["attempt"]["exit_code"], found["manifest"]["counts"]["rows"]) == (0, 3, 3)
    assert found["progress"]["phase"] == "done"
    code, _, err = vllm_batch("status", "nothing-here", cwd=folder)
    assert code == 69
    assert "no run in" in err


def test_a_server_answers_without_vllm(folder: Path) -> None:
    with OpenAIServer(key="sk-test-1234567890") as server:
        arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--server-url", server.url)
        done = vllm_batch(
            *arguments, "--allowed-failures", "1", cwd=folder, env={"OPENAI_API_KEY": "sk-test-1234567890"}
        )
    assert done.code == 0, done.err
    rows = read_rows(folder / "out" / "output.jsonl")
    assert [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows] == ["ONE", "TWO"]
    assert {row["response"]["request_id"] for row in rows} == {"id-1", "id-2"}
    # A row without a model asks for the one that was named; the row's own members stay.
    assert [body["model"] for body in server.requests] == ["m", "m"]
    everything = [
        done.out,
        done.err,
        *(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()),
    ]
    assert not [text for text in everything if "sk-test-1234567890" in text]


def test_a_wrong_key_stops_the_run_and_not_a_million_rows(folder: Path) -> None:
    with OpenAIServer(key="right") as server:
        done = vllm_batch("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--server-url", server.url, cwd=folder)
    assert done.code == 78
    assert "check the API key" in done.err


def test_a_server_that_stops_trusting_us_ends_the_run_and_keeps_what_it_answered(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [chat(f"r{number}", str(number)) for number in range(20)])

    def script(body: dict[str, object], before: int) -> web.Response | None:
        if len(server.requests) > 10:
            return web.json_response({"error": {"message": "expired"}}, status=403)
        return None

    arguments = ("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--max-in-flight", "1")
    with OpenAIServer(script=script) as server:
        done = vllm_batch(*arguments, "--server-url", f"{server.url}/v1", cwd=tmp_path)
        assert done.code == 78
        assert len(server.requests) == 11
    with OpenAIServer() as server:
        done = vllm_batch(*arguments, "--server-url", server.url, cwd=tmp_path)
    assert done.code == 0
    assert server.asked == [str(number) for number in range(10, 20)]
    assert len(read_rows(tmp_path / "out" / "output.jsonl")) == 20


def test_a_model_that_the_server_does_not_serve_is_exit_78(folder: Path) -> None:
    with OpenAIServer(models=["x", "y"]) as server:
        done = vllm_batch("run", "-i", "in.jsonl", "-o", "out/", "--model", "m", "--server-url", server.url, cwd=folder)
    assert done.code == 78
    assert "does not serve the model 'm'; it serves x, y" in done.err
