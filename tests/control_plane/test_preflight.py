"""What is found before an engine is asked for."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.task import chat_row  # isort: skip  before Airflow

from airflow_vllm_batch.arguments import Refusal
from airflow_vllm_batch.contract import BatchSpec, InputFile, OutputTarget
from airflow_vllm_batch.contract.spec import Adapter, EngineSpec, ModelSpec
from airflow_vllm_batch.preflight import (
    LABEL,
    SAMPLE_ROWS,
    RowsFound,
    already_checked,
    check_folder,
    check_places,
    check_rows,
    check_urls,
    check_weights,
    pin_inputs,
)
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import Conditions, StorageError
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import StoreFile
from tests.support.manifests import make_spec
from tests.support.seaweed import SeaweedServer

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def spec_of(
    folder: Path, rows: list[Mapping[str, Any] | str] | bytes, name: str = "in.jsonl", **changes: Any
) -> BatchSpec:
    path = folder / name
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return make_spec(inputs=(InputFile(uri=str(path)),), **changes)


async def check(spec: BatchSpec, mode: Any = "full") -> RowsFound:
    return await check_rows(spec, Access.ambient(), mode)


async def refused(spec: BatchSpec, mode: Any = "full") -> Refusal:
    with pytest.raises(Refusal) as caught:
        await check(spec, mode)
    return caught.value


# Rows


async def test_a_good_file_is_counted(tmp_path: Path) -> None:
    found = await check(spec_of(tmp_path, [chat_row("a"), "", chat_row("b")]))
    assert (found.requests, found.runnable, found.bad, found.warnings) == (2, 2, 0, [])


async def test_a_compressed_file_is_checked_like_any_other(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(chat_row("a")).encode())
    assert (await check(spec_of(tmp_path, packed, "in.jsonl.gz"))).runnable == 1
    error = await refused(spec_of(tmp_path, packed[:-4], "cut.jsonl.gz"))
    assert error.exit_code == 65
    assert "cut.jsonl.gz" in str(error)


async def test_bad_lines_within_the_threshold_are_a_warning(tmp_path: Path) -> None:
    found = await check(spec_of(tmp_path, [chat_row("a"), "nonsense"], allowed_failures=1))
    assert "1 of 2 requests are bad (invalid_json 1)" in found.warnings[0]


async def test_more_bad_lines_than_may_fail_start_nothing(tmp_path: Path) -> None:
    error = await refused(spec_of(tmp_path, [chat_row("a"), "nonsense", chat_row("c", stream=True)]))
    assert error.exit_code == 65
    assert str(error).startswith("2 of 3 rows can't succeed, 0 may fail (allowed_failures=0), so no engine was started")
    assert "line 2: " in str(error)
    assert "stream_not_supported" in str(error)


async def test_run_anyway_starts_all_the_same(tmp_path: Path) -> None:
    assert (await check(spec_of(tmp_path, [chat_row("a"), "nonsense"], run_anyway=True))).bad == 1
    assert (await check(spec_of(tmp_path, ["nonsense"], run_anyway=True))).runnable == 0


async def test_strict_refuses_one_bad_line_whatever_is_allowed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, [chat_row("a"), "nonsense"], bad_lines="strict", allowed_failures=1.0)
    error = await refused(spec)
    assert error.exit_code == 65
    assert "bad_lines='strict' refuses" in str(error)
    assert "line 2: " in str(error)


async def test_a_file_without_a_line_that_can_run_is_refused(tmp_path: Path) -> None:
    error = await refused(spec_of(tmp_path, ["nonsense", "[]"], allowed_failures=1.0))
    assert error.exit_code == 65
    assert "no line can run" in str(error)


@pytest.mark.parametrize("data", [b"\n \n", b"PK\x03\x04 and so on, quite long"])
async def test_a_file_that_holds_no_request_is_refused(tmp_path: Path, data: bytes) -> None:
    error = await refused(spec_of(tmp_path, data))
    assert error.exit_code == 65
    assert str(error).startswith("input refused: ")


async def test_rows_for_another_model_are_bad_lines(tmp_path: Path) -> None:
    rows = [chat_row("a", model="other"), chat_row("b")]
    error = await refused(spec_of(tmp_path, rows))
    assert "model_mismatch" in str(error)
    served = spec_of(tmp_path, rows, model=ModelSpec(name="x", served_names=("m", "other")))
    assert (await check(served)).runnable == 2


async def test_rows_that_use_tools_need_a_tool_parser(tmp_path: Path) -> None:
    rows = [chat_row("a", tools=TOOLS), chat_row("b", tools=TOOLS, tool_choice="none"), chat_row("c", "the tools")]
    error = await refused(spec_of(tmp_path, rows))
    assert error.exit_code == 78
    assert "1 rows use tools, and engine_args name no tool_call_parser" in str(error)
    parser = EngineSpec(args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})
    assert (await check(spec_of(tmp_path, rows, engine=parser))).warnings == []
    (warning,) = (await check(spec_of(tmp_path, rows, allowed_failures=1))).warnings
    assert "tool_call_parser" in warning


async def test_a_limit_bounds_the_check(tmp_path: Path) -> None:
    found = await check(spec_of(tmp_path, [chat_row("a"), chat_row("b"), "nonsense"], limit=2))
    assert (found.requests, found.bad, found.complete) == (2, 0, True)


async def test_a_sample_looks_at_the_first_rows_only(tmp_path: Path) -> None:
    rows = [chat_row(str(number)) for number in range(SAMPLE_ROWS)]
    found = await check(spec_of(tmp_path, [*rows, "nonsense"]), "sample")
    assert (found.requests, found.bad, found.complete) == (SAMPLE_ROWS, 0, False)


async def test_a_sample_can_not_tell_a_share_of_all_rows(tmp_path: Path) -> None:
    rows = ["nonsense", *[chat_row(str(number)) for number in range(SAMPLE_ROWS)]]
    assert (await check(spec_of(tmp_path, rows, allowed_failures=0.0), "sample")).bad == 1
    await refused(spec_of(tmp_path, rows, allowed_failures=0), "sample")


async def test_a_long_check_says_how_far_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    times = iter(range(0, 10_000, 31))
    spec = spec_of(tmp_path, [chat_row(str(number)) for number in range(2000)])
    await check_rows(spec, Access.ambient(), "full", clock=lambda: float(next(times)))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "1,000 rows so far, 0 bad",
        "2,000 rows so far, 0 bad",
    ]


# A check that was made before


def checked(**changes: Any) -> BatchSpec:
    inputs = (InputFile(uri="s3://b/in.jsonl", etag='"1"', size=10),)
    return make_spec(**{"inputs": inputs, "labels": {LABEL: "full"}, **changes})


def test_an_unchanged_input_is_not_checked_again() -> None:
    assert already_checked(checked(), checked(attempt=2, seed=1), "full")
    assert already_checked(checked(), checked(), "sample")


@pytest.mark.parametrize(
    "before",
    [
        None,
        checked(labels={}),
        checked(labels={LABEL: "sample"}),
        checked(inputs=(InputFile(uri="s3://b/in.jsonl", etag='"2"', size=10),)),
        checked(bad_lines="strict"),
        checked(limit=5),
        checked(model=ModelSpec(name="m", served_names=("n",))),
        checked(engine=EngineSpec(args={"tool_call_parser": "x"})),
    ],
)
def test_anything_else_is_checked_again(before: BatchSpec | None) -> None:
    assert not already_checked(before, checked(), "full")


def test_an_input_without_an_etag_is_always_checked() -> None:
    inputs = (InputFile(uri="https://h/in.jsonl", size=10),)
    assert not already_checked(checked(inputs=inputs), checked(inputs=inputs), "full")


# Places


@pytest.mark.parametrize(
    ("source", "output", "state"),
    [
        ("s3://b/out/output.jsonl", "s3://b/out/", "s3://b/out/"),
        ("s3://b/out/errors.jsonl", "s3://b/out/", "s3://b/out/"),
        ("s3a://b/x.jsonl", "s3://b/x.jsonl", "s3://b/x.vllm_batch/"),
        ("/d/../d/x.jsonl", "file:///d/x.jsonl", "/d/x.vllm_batch/"),
        ("https://h/x", "https://H:443/x", "/state/"),
    ],
)
def test_an_input_that_is_its_own_output_is_refused(source: str, output: str, state: str) -> None:
    with pytest.raises(Refusal, match="input and output are the same object") as caught:
        check_places((InputFile(uri=source),), output, state)
    assert caught.value.exit_code == 64


def test_an_input_beside_its_output_is_fine() -> None:
    check_places((InputFile(uri="s3://b/out/in.jsonl"),), "s3://b/out/", "s3://b/out/")


async def test_inputs_are_pinned_as_they_are_now(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, [chat_row("a")])
    (pinned,) = await pin_inputs(Access.ambient(), spec.inputs)
    assert pinned.size == Path(pinned.uri).stat().st_size
    assert pinned.etag


async def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the input does not exist: '/no/in\.jsonl'"):
        await pin_inputs(Access.ambient(), (InputFile(uri="/no/in.jsonl"),))


async def test_a_folder_that_can_not_be_written_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = f"{tmp_path}/file/out/"
    with pytest.raises(StorageError, match="the output folder can't be written"):
        await check_folder(RunFolder(Access.ambient(), OutputTarget(uri=target, state_uri=target)))


async def test_a_store_that_ignores_conditions_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{tmp_path}/out/"
    folder = RunFolder(Access.ambient(), OutputTarget(uri=target, state_uri=target))
    assert await check_folder(folder) == []

    async def probe() -> Conditions:
        return Conditions(create_only=True, if_match=False)

    monkeypatch.setattr(folder.store, "probe", probe)
    (warning,) = await check_folder(folder)
    assert "ignores conditional writes" in warning


# Signed URLs

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def signed(ends: datetime) -> StoreFile:
    url = f"https://h/x?Expires={int(ends.timestamp())}&Signature=secret"
    return StoreFile.model_validate({"urls": {"https://h/x": url}})


def test_a_signed_url_that_has_ended_is_told_without_its_signature() -> None:
    with pytest.raises(StorageError) as caught:
        check_urls(signed(NOW), NOW)
    assert str(caught.value) == "the signed URL of https://h/x ended at 2026-01-01T00:00:00+00:00: give a fresh one"


def test_a_signed_url_that_ends_soon_is_a_warning() -> None:
    (warning,) = check_urls(signed(NOW + timedelta(minutes=10)), NOW)
    assert "ends at 2026-01-01T00:10:00+00:00" in warning
    assert check_urls(signed(NOW + timedelta(hours=2)), NOW) == []


# Weights in object storage


@pytest.mark.s3
async def test_a_model_in_object_storage_is_looked_at_before_the_start(s3_server: SeaweedServer) -> None:
    for key, text in {"good/config.json": "{}", "torn/config.json": "{", "law/adapter_config.json": "{}"}.items():
        s3_server.put_raw("tests", f"preflight/{key}", text.encode())

    async def look(model: str, *adapters: str, **other_keys: str) -> None:
        await check_weights(
            Access.from_document(StoreFile(stores={"model": s3_server.settings(**other_keys)})),
            make_spec(
                model=ModelSpec(name=model, adapters=tuple(Adapter(name=uri, uri=uri) for uri in adapters)),
                engine=EngineSpec(),
            ),
        )

    good, law = "s3://tests/preflight/good/", "s3://tests/preflight/law/"
    await look(good, law)
    await look("org/model")
    for model, adapter, phrase in [
        ("s3://tests/preflight/", law, r"model 's3://tests/preflight/' has no config\.json"),
        (good, good, r"adapter 's3://tests/preflight/good/' has no adapter_config\.json"),
        ("s3://tests/preflight/torn", law, r"torn/config\.json is no JSON object"),
    ]:
        with pytest.raises(Refusal, match=phrase) as caught:
            await look(model, adapter)
        assert caught.value.exit_code == 78
    with pytest.raises(StorageError, match="permission denied"):
        await look(good, secret_access_key="wrong-key-0000000000")
