"""What of the vLLM adapter can be told without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_vllm_batch.contract import ModelSpec
from airflow_vllm_batch.contract.spec import Adapter
from airflow_vllm_batch.runner.engine.asgi import post
from airflow_vllm_batch.runner.engine.base import Reply
from airflow_vllm_batch.runner.engine.parent_death import MARK, register
from airflow_vllm_batch.runner.engine.start_failure import explain
from airflow_vllm_batch.runner.engine.vllm_engine import (
    VLLMEngine,
    _is_short,
    _render_short_prompts_here,
    _without_nulls,
    argv_of,
)
from airflow_vllm_batch.runner.errors import EngineStartError
from airflow_vllm_batch.runner.log_tail import LogTail


def test_engine_arguments_become_the_command_line_that_vllm_reads() -> None:
    model = ModelSpec(name="org/model", served_names=("a", "b"), revision="v1", adapters=(Adapter(name="l", uri="/l"),))
    args = {
        "max_model_len": 1024,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "quantization": None,
        "gpu_memory_utilization": 0.3,
        "override_generation_config": {"top_k": 1},
        "allowed_media_domains": ["x.org", "y.org"],
        "seed": -1,
        "-tp": 2,
    }
    assert argv_of(model, args, seed=7) == [
        *("--model", "org/model", "--served-model-name", "a", "b", "--revision", "v1"),
        *("--enable-lora", "--lora-modules", '{"name": "l", "path": "/l"}'),
        *("--max-model-len=1024", "--enforce-eager", "--no-enable-prefix-caching", "--gpu-memory-utilization=0.3"),
        *('--override-generation-config={"top_k": 1}', "--allowed-media-domains", "x.org", "y.org", "--seed=-1"),
        *("-tp", "2"),
    ]
    assert argv_of(ModelSpec(name="m"), {}, seed=7) == ["--model", "m", "--seed", "7"]


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"a":1,"n":null}', b'{"a":1}'),
        (b'{"messages":[{"content":null}], "n" : null }', b'{"messages":[{"content":null}]}'),
        (b'{"messages":[{"content":null}]}', b'{"messages":[{"content":null}]}'),
        (b'{ "a": 12345678901234567890123 }', b'{ "a": 12345678901234567890123 }'),
        (b'{"a":1.0e5,"n":null}', b'{"a":1.0e5}'),
    ],
)
def test_a_parameter_that_is_null_is_not_set(body: bytes, sent: bytes) -> None:
    assert _without_nulls(body) == sent


async def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    engine = VLLMEngine(ModelSpec(name="m"), {}, seed=None, log=LogTail())
    with pytest.raises(EngineStartError, match=r"install airflow-provider-vllm-batch\[vllm\] beside the runner"):
        await engine.start()


NOISE = "(EngineCore pid=1) INFO 12-01 07:26:40 [core.py:1] starting\n"


@pytest.mark.parametrize(
    ("log", "cause", "passing"),
    [
        (
            "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory",
            "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory",
            True,
        ),
        ("RuntimeError: NCCL error: unhandled system error", "RuntimeError: NCCL error: unhandled system error", True),
        ("RuntimeError: No CUDA GPUs are available: CUDA initialization failed", "RuntimeError: No CUDA GPUs", True),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "torch.OutOfMemoryError: CUDA out of memory",
            False,
        ),
        ("ValueError: No available memory for the cache blocks.", "ValueError: No available memory", False),
        ("KeyError: 'model.layers.0'", "KeyError: 'model.layers.0'", False),
    ],
)
def test_the_cause_of_a_failed_start_is_read_from_the_engines_log(log: str, cause: str, passing: bool) -> None:
    raised = RuntimeError("Engine core initialization failed. See root cause above.")
    failure = explain(raised, NOISE + f"(EngineCore pid=1) ERROR 12-01 07:26:41 [core.py:9] {log}\n" + NOISE)
    assert failure.cause.startswith(cause)
    assert failure.passing is passing


def test_a_cause_in_this_process_needs_no_log() -> None:
    raised = RuntimeError("wrapper")
    raised.__cause__ = OSError("no such model")
    assert explain(raised, "").cause == "OSError: no such model"


def test_the_plugin_does_nothing_in_a_vllm_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    register()
    monkeypatch.setenv(MARK, "1")
    register()  # this process was not started by multiprocessing


class SwallowingHandler:
    """Does as vLLM's handlers do: a cancelled request ends as a refusal."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def answer(self, body: bytes) -> Reply:
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return Reply(400, b'{"error":{"message":"Client disconnected"}}')


def engine_with(handler: SwallowingHandler) -> VLLMEngine:
    engine = VLLMEngine(ModelSpec(name="m"), {}, seed=None, log=LogTail())
    engine._client = SimpleNamespace(errored=False)
    engine._handlers = {"/v1/completions": handler}  # type: ignore[dict-item]
    return engine


async def test_a_request_that_is_cancelled_never_comes_back_as_a_refused_row() -> None:
    handler = SwallowingHandler()
    sending = asyncio.create_task(engine_with(handler).send("/v1/completions", b"{}"))
    await handler.asked.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_a_request_that_takes_too_long_is_a_timeout_and_no_refused_row() -> None:
    engine = engine_with(SwallowingHandler())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.send("/v1/completions", b"{}")


class Renderer:
    """Has an executor where vLLM's renderer has it."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor


@pytest.mark.parametrize(("short", "here"), [(True, True), (False, False)])
async def test_a_short_prompt_is_rendered_at_once_and_a_long_one_in_a_thread(short: bool, here: bool) -> None:
    with ThreadPoolExecutor(1) as executor:
        _render_short_prompts_here(SimpleNamespace(renderer=Renderer(executor)))
        _is_short.set(short)
        loop = asyncio.get_running_loop()
        thread = await loop.run_in_executor(executor, threading.get_ident)
        assert (thread == threading.get_ident()) is here
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(executor, lambda: 1 // 0)


def test_a_release_whose_renderer_has_no_executor_is_left_as_it_is() -> None:
    _render_short_prompts_here(SimpleNamespace(renderer=SimpleNamespace()))
    _render_short_prompts_here(SimpleNamespace())


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = json.loads((await receive())["body"])
    if body.get("boom"):
        raise ValueError("boom")
    answer = json.dumps([scope["path"], scope["method"], body]).encode()
    await send({"type": "http.response.start", "status": 201, "headers": [(b"x-request-id", b"id-1")]})
    await send({"type": "http.response.body", "body": answer[:5], "more_body": True})
    await send({"type": "http.response.body", "body": answer[5:]})


async def test_an_application_is_asked_without_a_socket() -> None:
    reply = await post(application, "/v1/x", b'{"a": 1}')
    assert (reply.status, json.loads(reply.body), reply.request_id) == (201, ["/v1/x", "POST", {"a": 1}], "id-1")


async def test_an_application_that_breaks_is_a_500_with_its_words() -> None:
    reply = await post(application, "/v1/x", b'{"boom": 1}')
    assert (reply.status, json.loads(reply.body)) == (500, {"error": {"message": "ValueError: boom"}})
