"""A whole run, from the input to the manifest, with an engine of the test's own and real files."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import zstandard

from airflow_vllm_batch.batchfile.reader import InputRejectedError
from airflow_vllm_batch.contract import ErrorCode, ExitCode, InputFile, ModelSpec, Outcome, OutputTarget
from airflow_vllm_batch.runner.engine.base import Reply
from airflow_vllm_batch.runner.errors import EngineDownError, ServerRefusesError, StoppedError
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.runner.signals import StopSignal
from airflow_vllm_batch.storage.base import StorageError
from tests.support.runs import LocalRun, ScriptedEngine, answer, chat


def echo_after(*, fail_at: str, error: Exception) -> ScriptedEngine:
    """Return an engine that breaks at one prompt."""

    def script(text: str, before: int) -> Reply:
        if text == fail_at:
            raise error
        return Reply(200, answer(text.upper()))

    return ScriptedEngine(script)


async def test_every_line_ends_in_one_of_the_two_files_in_input_order(tmp_path: Path) -> None:
    run = LocalRun(
        tmp_path,
        [
            chat("r1", "one"),
            "",
            "{broken",
            chat("r2", "two"),
            chat("r3", "three", model="other"),
            chat("r1", "again"),
            chat("r4", "four"),
        ],
    )

    def script(text: str, before: int) -> Reply:
        if text == "two":
            return Reply(400, b'{"error":{"message":"too hot","type":"BadRequestError","param":"temperature"}}')
        return Reply(200, answer(text.upper()))

    exit_code, manifest = await run.run(ScriptedEngine(script))

    assert exit_code is ExitCode.TOO_MANY_FAILED
    assert [
        (row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"]) for row in run.succeeded
    ] == [
        ("r1", "ONE"),
        ("r4", "FOUR"),
    ]
    assert [(row["custom_id"], row["error"]["code"]) for row in run.failed] == [
        (None, "invalid_json"),
        ("r2", "engine_rejected"),
        ("r3", "model_mismatch"),
        ("r1", "duplicate_custom_id"),
    ]
    refused = run.failed[1]
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert refused["error"]["message"] == "too hot"
    assert run.failed[0]["response"] is None
    assert manifest.counts.by_outcome == {Outcome.SUCCEEDED: 2, Outcome.FAILED: 1, Outcome.INVALID: 3}
    assert [(output.role, output.lines) for output in manifest.outputs] == [("output", 2), ("errors", 4)]
    assert manifest.inputs[0].lines == 7
    assert (manifest.usage.prompt_tokens, manifest.usage.completion_tokens) == (4, 6)
    assert manifest.answers.by_finish_reason == {"stop": 2}


async def test_the_errors_file_is_there_and_empty_when_every_row_succeeds(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b")])
    exit_code, manifest = await run.run(ScriptedEngine())
    assert exit_code is ExitCode.PASSED
    assert (tmp_path / "out" / "errors.jsonl").read_bytes() == b""
    assert manifest.verdict.passed
    assert [output.bytes for output in manifest.outputs][1] == 0


async def test_all_rows_failed_is_no_success(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b")])
    exit_code, manifest = await run.run(ScriptedEngine(lambda *_: Reply(400, b'{"error":{"message":"no"}}')))
    assert exit_code is ExitCode.TOO_MANY_FAILED
    assert [(group.code, group.count, group.custom_ids) for group in manifest.error_groups] == [
        ("engine_rejected", 2, ["a", "b"])
    ]
    assert run.succeeded == []


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(0, ExitCode.TOO_MANY_FAILED), (1, ExitCode.PASSED), (0.25, ExitCode.PASSED), (0.2, ExitCode.TOO_MANY_FAILED)],
)
async def test_the_threshold_is_a_count_or_a_share(tmp_path: Path, allowed: float, expected: ExitCode) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b"), chat("c"), chat("d", model="other")])
    exit_code, _ = await run.run(ScriptedEngine(), allowed_failures=allowed)
    assert exit_code is expected


async def test_a_file_without_a_runnable_line_writes_its_errors_and_starts_no_engine(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, ["{", chat("a", model="other")])
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine, allowed_failures=1.0)
    assert (exit_code, engine.starts) == (ExitCode.INPUT_REFUSED, 0)
    assert [row["error"]["code"] for row in run.failed] == ["invalid_json", "model_mismatch"]
    assert manifest.counts.rows == 2


@pytest.mark.parametrize("content", ["", "\n \n\t\r\n"])
async def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    run = LocalRun(tmp_path, [])
    run.input.write_text(content)
    with pytest.raises(InputRejectedError, match="there is no request in the input") as refused:
        await run.run(ScriptedEngine())
    assert refused.value.code is ErrorCode.EMPTY_FILE


async def test_strict_refuses_the_file_before_the_engine_starts_and_names_the_lines(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), "{", chat("b"), chat("c", stream=True)])
    engine = ScriptedEngine()
    with pytest.raises(InputRejectedError) as refused:
        await run.run(engine, bad_lines="strict")
    assert engine.starts == 0
    assert "2 of 4 requests are bad" in refused.value.message
    assert "line 2" in refused.value.message
    assert "line 4" in refused.value.message


async def test_a_second_try_asks_only_for_rows_without_a_result(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(20)])
    with pytest.raises(ServerRefusesError):
        await run.run(echo_after(fail_at="p12", error=ServerRefusesError("expired")), max_in_flight=2)
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine)
    assert exit_code is ExitCode.PASSED
    assert [row["custom_id"] for row in run.succeeded] == [f"r{number}" for number in range(20)]
    assert manifest.rows_reused + sum(engine.asked.values()) == 20
    assert manifest.rows_reused >= 10
    assert "p0" not in engine.asked
    assert "p12" in engine.asked


async def test_a_second_try_runs_failed_rows_that_can_heal_and_no_others(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("good", "good"), chat("busy", "busy"), chat("bad", "bad"), chat("lost", model="x")])
    replies = {"busy": Reply(503, b"{}"), "bad": Reply(400, b'{"error":{"message":"no"}}')}
    _, first = await run.run(ScriptedEngine(lambda text, _: replies.get(text, Reply(200, answer(text)))), row_retries=0)
    assert first.healable_rows == 1
    engine = ScriptedEngine()
    _, second = await run.run(engine)
    assert dict(engine.asked) == {"busy": 1}
    assert second.healable_rows == 0
    assert [row["custom_id"] for row in run.succeeded] == ["good", "busy"]
    assert [row["custom_id"] for row in run.failed] == ["bad", "lost"]


async def test_a_try_with_nothing_left_to_ask_starts_no_engine(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b")])
    await run.run(ScriptedEngine())
    for name in ("output.jsonl", "errors.jsonl", "manifest.json"):
        (run.output / name).unlink()
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine)
    assert (exit_code, engine.starts, manifest.rows_reused) == (ExitCode.PASSED, 0, 2)
    assert [row["custom_id"] for row in run.succeeded] == ["a", "b"]


async def test_a_changed_line_runs_again_and_the_others_are_kept(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "one"), chat("b", "two"), chat("c", "three")])
    await run.run(ScriptedEngine())
    run.input.write_text(run.input.read_text().replace("two", "zwei"))
    engine = ScriptedEngine()
    await run.run(engine)
    assert dict(engine.asked) == {"zwei": 1}


async def test_another_model_or_seed_runs_every_row_anew(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "one"), chat("b", "two")])
    await run.run(ScriptedEngine())
    engine = ScriptedEngine()
    await run.run(engine, seed=7)
    assert dict(engine.asked) == {"one": 1, "two": 1}
    await run.run(engine, model=ModelSpec(name="m2", served_names=("m",)), seed=7)
    assert dict(engine.asked) == {"one": 2, "two": 2}


async def test_thresholds_and_limits_are_no_reason_to_run_again(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b")])
    await run.run(ScriptedEngine())
    engine = ScriptedEngine()
    await run.run(engine, allowed_failures=0.5, row_retries=9, max_in_flight=1)
    assert engine.starts == 0


async def test_a_torn_segment_is_set_aside_and_only_its_rows_run_again(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(6)])
    await run.run(ScriptedEngine(), checkpoint_rows=2, max_in_flight=1)
    segments = sorted((run.output / "_vllm_batch" / "1" / "segments").glob("*.zst"))
    assert len(segments) == 3
    segments[1].write_bytes(segments[1].read_bytes()[:-5])
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine)
    assert (exit_code, dict(engine.asked), manifest.rows_reused) == (ExitCode.PASSED, {"p2": 1, "p3": 1}, 4)


async def test_a_stop_keeps_what_was_finished_and_the_next_try_goes_on(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(10)])
    stop = StopSignal()

    def script(text: str, before: int) -> Reply:
        if text == "p6":
            stop.request("received SIGTERM")
        return Reply(200, answer(text))

    with pytest.raises(StoppedError, match="received SIGTERM"):
        await run.run(ScriptedEngine(script), stop=stop, max_in_flight=1)
    assert not (run.output / "manifest.json").exists()
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine)
    assert exit_code is ExitCode.PASSED
    assert manifest.rows_reused >= 6
    assert not {"p0", "p1", "p2", "p3", "p4", "p5"} & set(engine.asked)
    assert len(run.succeeded) == 10


async def test_a_stop_before_anything_ran_ends_the_run(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a")])
    stop = StopSignal()
    stop.request("received SIGINT")
    with pytest.raises(StoppedError, match="received SIGINT"):
        await run.run(ScriptedEngine(), stop=stop)


async def test_the_engine_is_stopped_whatever_ends_the_run(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "boom")])
    engine = echo_after(fail_at="boom", error=RuntimeError("a bug in the adapter"))
    with pytest.raises(RuntimeError, match="a bug in the adapter"):
        await run.run(engine)
    assert engine.stops == 1


async def test_a_row_that_kills_the_engine_is_reported_and_the_others_succeed(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(12)])
    engine = echo_after(fail_at="p5", error=EngineDownError("dead"))
    exit_code, manifest = await run.run(engine, allowed_failures=1)
    assert (exit_code, len(run.succeeded)) == (ExitCode.PASSED, 11)
    assert [(row["custom_id"], row["error"]["code"], row["response"]) for row in run.failed] == [
        ("r5", "engine_crash", None)
    ]
    # It would kill the next try's engine as well, so it is final.
    assert manifest.healable_rows == 0
    again = ScriptedEngine()
    await run.run(again)
    assert again.asked == {}


async def test_an_engine_that_can_not_be_kept_alive_ends_the_run_and_keeps_its_rows(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", f"p{number}") for number in range(12)])

    def script(text: str, before: int) -> Reply:
        if int(text[1:]) >= 6:
            raise EngineDownError("dead")
        return Reply(200, answer(text))

    with pytest.raises(EngineDownError, match="without answering a row"):
        await run.run(ScriptedEngine(script), max_in_flight=6, engine_restarts=2)
    engine = ScriptedEngine()
    await run.run(engine)
    assert not {f"p{number}" for number in range(6)} & set(engine.asked)
    assert len(run.succeeded) == 12


async def test_one_file_holds_every_row_in_input_order(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), "{", chat("b")])
    target = OutputTarget(uri=str(tmp_path / "all.jsonl"), state_uri=f"{tmp_path}/all.vllm_batch/")
    exit_code, manifest = await run.run(ScriptedEngine(), output=target, allowed_failures=1)
    assert exit_code is ExitCode.PASSED
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_bytes().splitlines()]
    assert [(row["custom_id"], row["error"] and row["error"]["code"]) for row in rows] == [
        ("a", None),
        (None, "invalid_json"),
        ("b", None),
    ]
    assert [(output.role, output.lines) for output in manifest.outputs] == [("all", 3)]
    assert (tmp_path / "all.vllm_batch" / "manifest.json").exists()


async def test_a_limit_takes_only_the_first_rows(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "1"), "{", chat("c", "3"), chat("d", "4")])
    engine = ScriptedEngine()
    _, manifest = await run.run(engine, limit=2)
    assert (dict(engine.asked), manifest.counts.rows, manifest.inputs[0].sha256) == ({"1": 1}, 2, None)


async def test_compressed_inputs_are_read_by_their_name(tmp_path: Path) -> None:
    plain = (json.dumps(chat("a", "one")) + "\n" + json.dumps(chat("b", "two"))).encode()
    for name, packed in (("x.jsonl.gz", gzip.compress(plain)), ("y.jsonl.zst", zstandard.compress(plain))):
        root = tmp_path / name
        root.mkdir()
        run = LocalRun(root, [], name=name)
        run.input.write_bytes(packed)
        engine = ScriptedEngine()
        _, manifest = await run.run(engine)
        assert dict(engine.asked) == {"one": 1, "two": 1}
        assert manifest.inputs[0].size == len(packed)


async def test_a_staged_copy_is_read_instead_of_the_source(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "one"), chat("b", "two")])
    copy = run.output / "_vllm_batch" / "1" / "input" / "00.jsonl.zst"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(zstandard.compress(run.input.read_bytes()))
    run.input.unlink()
    source = InputFile(uri=str(run.input), etag="of the source", staged="_vllm_batch/1/input/00.jsonl.zst")
    engine = ScriptedEngine()
    exit_code, manifest = await run.run(engine, inputs=(source,))
    assert (exit_code, dict(engine.asked)) == (ExitCode.PASSED, {"one": 1, "two": 1})
    assert manifest.inputs[0].uri == str(run.input)


async def test_an_answer_with_foreign_line_ends_or_broken_text_stays_one_line(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a", "1"), chat("b", "2"), chat("c", "3")])
    bodies = {
        "1": b'{"choices":[{"message":{"content":"x\xe2\x80\xa8y\xc2\x85z"}}]}',
        "2": b'{\n "choices": [\n  {"message": {"content": "pretty"}}]\r\n}',
        "3": b'{"choices":[{"message":{"content":"\\ud800 alone"}}]}',
    }
    await run.run(ScriptedEngine(lambda text, _: Reply(200, bodies[text])))
    text = (run.output / "output.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 3
    contents = [row["response"]["body"]["choices"][0]["message"]["content"] for row in run.succeeded]
    assert contents == ["x\u2028y\x85z", "pretty", "\ufffd alone"]


async def test_a_success_that_is_no_json_is_kept_as_text(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a")])
    await run.run(ScriptedEngine(lambda *_: Reply(200, b"<html>\xff")))
    assert run.succeeded[0]["response"]["body"] == "<html>\ufffd"


async def test_a_missing_input_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a")])
    run.input.unlink()
    with pytest.raises(FileNotFoundError, match=r"in\.jsonl"):
        await run.run(ScriptedEngine())


async def test_segments_that_can_not_be_put_end_the_run_before_an_output_is_written(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat("a"), chat("b")])
    engine = ScriptedEngine()

    def script(text: str, before: int) -> Reply:
        segments = run.output / "_vllm_batch" / "1" / "segments"
        if not segments.exists():
            segments.parent.mkdir(parents=True, exist_ok=True)
            segments.write_text("a file where the folder should be")
        return Reply(200, answer(text))

    engine.script = script
    with pytest.raises(StorageError):
        await run.run(engine, patience=Patience(seconds=0))
    assert not (run.output / "output.jsonl").exists()


async def test_rows_of_any_order_of_finishing_come_out_in_input_order(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, [chat(f"r{number}", str(number)) for number in range(30)])

    class Shuffling(ScriptedEngine):
        async def send(self, endpoint: str, body: bytes) -> Reply:
            number = int(json.loads(body)["messages"][0]["content"])
            for _ in range((number * 7) % 11):
                await asyncio.sleep(0)
            return await super().send(endpoint, body)

    await run.run(Shuffling(), max_in_flight=8, checkpoint_rows=3)
    assert [row["custom_id"] for row in run.succeeded] == [f"r{number}" for number in range(30)]
