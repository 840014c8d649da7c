"""vLLM's async engine in this process, asked through vLLM's own application object. The only module that knows vLLM.

Names move between vLLM's releases; where each is looked up stands in ``_entry_points``. Nothing of vLLM is imported
before ``start``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import os
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from pydantic import JsonValue

from airflow_vllm_batch.contract import ModelSpec
from airflow_vllm_batch.contract.manifest import Hardware
from airflow_vllm_batch.runner.engine import parent_death
from airflow_vllm_batch.runner.engine.asgi import post
from airflow_vllm_batch.runner.engine.base import (
    ENDPOINTS,
    EngineInfo,
    EngineLog,
    EngineStats,
    Refusal,
    Reply,
    refuse_unserved,
)
from airflow_vllm_batch.runner.engine.engine_processes import EngineProcesses
from airflow_vllm_batch.runner.engine.start_failure import explain
from airflow_vllm_batch.runner.errors import EngineDownError, EngineStartError, SpecError

log = logging.getLogger(__name__)

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
SERVER_FLAGS = frozenset(
    {"host", "port", "uds", "api_key", "ssl_keyfile", "ssl_certfile", "root_path", "api_server_count"}
)
"""Flags of vLLM's parser that only a listening server can obey."""
SHORT_BYTES = 8192
"""Of a request's body: the tokenizer takes some two milliseconds for so much."""
_is_short: ContextVar[bool] = ContextVar("_is_short", default=False)
_HANDLERS = {
    "/v1/chat/completions": ("openai_serving_chat", "create_chat_completion"),
    "/v1/completions": ("openai_serving_completion", "create_completion"),
}
"""Endpoint to the member of the application's state that answers it, and its method."""
_COUNTERS = ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:num_preemptions_total")
"""In the order of :class:`EngineStats`."""
_PROGRESS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class _EntryPoints(NamedTuple):
    make_arg_parser: Callable[..., Any]
    build_async_engine_client: Callable[..., Any]
    build_app: Callable[..., Any]
    init_app_state: Callable[..., Any]
    parser_class: type[Any]
    usage_context: Any


_PLACES = {
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "build_async_engine_client": (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
    ),
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
}
"""Name to the modules that have it, newest release first (0.32, then 0.28)."""


def argv_of(model: ModelSpec, args: Mapping[str, JsonValue], seed: int | None = None) -> list[str]:
    """Return the command line that vLLM's own parser reads.

    ``True`` is a bare flag, ``False`` its ``--no-`` form, None is left out, a list gives several values, an object
    JSON. A key that starts with a dash stands as it is.
    """
    argv = ["--model", model.name]
    if model.served_names and "served_model_name" not in args:
        argv += ["--served-model-name", *model.served_names]
    if model.revision is not None and "revision" not in args:
        argv += ["--revision", model.revision]
    if seed is not None and "seed" not in args:
        argv += ["--seed", str(seed)]
    if model.adapters and "lora_modules" not in args:
        argv += ["--enable-lora", "--lora-modules"]
        argv += [json.dumps({"name": adapter.name, "path": adapter.uri}) for adapter in model.adapters]
    for name, value in args.items():
        flag = name if name.startswith("-") else "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                argv.append(flag)
            case False:
                argv.append("--no-" + flag.removeprefix("--"))
            case list():
                argv += [flag, *(_scalar(item) for item in value)]
            case _:
                # One token, so that a value with a leading dash can't be taken for a flag.
                argv += [f"{flag}={_scalar(value)}"] if flag.startswith("--") else [flag, _scalar(value)]
    return argv


def _scalar(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class VLLMEngine:
    """The engine behind ``--model``.

    :param log: what this process and its children print, to explain a failed start or a death.
    """

    def __init__(self, model: ModelSpec, args: Mapping[str, JsonValue], *, seed: int | None, log: EngineLog) -> None:
        self._model = model
        self._args = args
        self._seed = seed
        self._log = log
        self._log_from = log.position()
        self._exit = contextlib.AsyncExitStack()
        self._client: Any = None
        self._app: Any = None
        self._info: EngineInfo | None = None
        self._processes: EngineProcesses | None = None
        self._given_up: str | None = None
        self._handlers: dict[str, _Handler] = {}
        self._stats_before = EngineStats(0, 0, 0)

    async def start(self) -> EngineInfo:
        entry = _entry_points()
        namespace = self._parse(entry)
        _end_with_us()
        self._log_from = self._log.position()
        try:
            self._client = await self._exit.enter_async_context(
                entry.build_async_engine_client(namespace, usage_context=entry.usage_context)
            )
            tasks = await self._client.get_supported_tasks()
            # Later releases decide by the model which pooling endpoints there are; earlier ones know no third argument.
            more = {"model_config": self._client.model_config} if _takes(entry.build_app, "model_config") else {}
            self._app = entry.build_app(namespace, tasks, **more)
            await entry.init_app_state(self._client, self._app.state, namespace, tasks)
        except (Exception, SystemExit) as error:
            # What a failed start leaves behind would hold the memory that the next one needs.
            await asyncio.to_thread(EngineProcesses().wait, 0.0)
            failure = explain(error, self._log.since(self._log_from))
            advice = f" ({failure.advice})" if failure.advice else ""
            raise EngineStartError(
                f"vLLM can't start {self._model.name}: {failure.cause}{advice}", passing=failure.passing
            ) from error
        # vLLM's error handler asks its launcher's server to leave when the engine is dead; here it finds this one.
        self._app.state.server = SimpleNamespace(should_exit=False)
        self._processes = EngineProcesses()
        self._log_from = self._log.position()
        self._handlers = _find_handlers(self._app.state)
        _render_short_prompts_here(self._client)
        self._info = self._describe(namespace)
        return self._info

    def _parse(self, entry: _EntryPoints) -> argparse.Namespace:
        if wrong := sorted(SERVER_FLAGS & {name.lstrip("-").replace("-", "_") for name in self._args}):
            raise SpecError(f"engine argument {wrong[0]} is for a listening server; the engine runs in this process")
        parser = entry.make_arg_parser(entry.parser_class())

        def refuse(message: str) -> None:
            raise SpecError(f"vLLM refuses the engine arguments: {message}")

        parser.error = refuse
        try:
            namespace = parser.parse_args(argv_of(self._model, self._args, self._seed))
        except SystemExit as error:
            raise SpecError("vLLM refuses the engine arguments; its words are in the log above") from error
        except (ValueError, TypeError) as error:
            raise SpecError(f"vLLM refuses the engine arguments: {error}") from error
        if not isinstance(namespace, argparse.Namespace):
            raise TypeError(f"vLLM's parser returned {type(namespace).__name__}")
        return namespace

    def check(self, endpoint: str, body: bytes) -> Refusal | None:
        if self._info is None:
            return None
        return refuse_unserved(self._info, endpoint)

    async def send(self, endpoint: str, body: bytes) -> Reply:
        if self.down:
            raise EngineDownError(self._why_down())
        body = _without_nulls(body)
        _is_short.set(len(body) <= SHORT_BYTES)
        handler = self._handlers.get(endpoint)
        reply = await handler.answer(body) if handler is not None else None
        if reply is None and not self.down:
            reply = await post(self._app, endpoint, body)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # vLLM answers a cancelled request with a refusal, "Client disconnected", which says nothing of the row.
            raise asyncio.CancelledError
        if reply is None or (reply.status >= 500 and self.down):
            raise EngineDownError(self._why_down())
        return reply

    @property
    def down(self) -> bool:
        return self._client is None or self._given_up is not None or bool(self._client.errored)

    def give_up(self, reason: str) -> None:
        self._given_up = reason

    def _why_down(self) -> str:
        if self._client is None:
            return "the engine was not started"
        if self._given_up is not None:
            return f"vLLM's engine was given up: {self._given_up}"
        return f"vLLM's engine died: {explain(RuntimeError('EngineCore'), self._log.since(self._log_from)).cause}"

    async def restart(self) -> None:
        self._stats_before = self.stats()
        await self._close(kill=True)
        try:
            await self.start()
        except EngineStartError as error:
            raise EngineStartError(f"after its death {error}", passing=True) from error

    def stats(self) -> EngineStats:
        if self._client is None:
            return self._stats_before
        counted = _counters(*_COUNTERS)
        # A new engine in this process counts from zero again.
        return EngineStats(
            *(
                None if now is None else now + (before or 0)
                for now, before in zip(counted, self._stats_before, strict=True)
            )
        )

    def progress_mark(self) -> int | None:
        tokens = [count for count in _counters(*_PROGRESS) if count is not None]
        return sum(tokens) if tokens else None

    async def stop(self) -> None:
        await self._close(kill=self.down)

    async def _close(self, *, kill: bool) -> None:
        """End the engine; with ``kill`` without asking it, since it may hang."""
        processes, self._processes = self._processes, None
        if kill and processes is not None:
            processes.kill()
        try:
            await self._exit.aclose()
        finally:
            self._client = self._app = self._given_up = None
            self._handlers = {}
            if processes is not None:
                await asyncio.to_thread(processes.wait)

    def _describe(self, namespace: argparse.Namespace) -> EngineInfo:
        config = self._client.vllm_config
        model, scheduler, cache, parallel = (
            config.model_config,
            config.scheduler_config,
            config.cache_config,
            config.parallel_config,
        )
        routes = {path for route in self._app.routes if (path := getattr(route, "path", None))}
        names = namespace.served_model_name or [namespace.model]
        adapters = [module.name for module in namespace.lora_modules or ()]
        return EngineInfo(
            served_names=(*([names] if isinstance(names, str) else names), *adapters),
            endpoints=frozenset(ENDPOINTS) & routes,
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            version=_version(),
            values={
                "max_model_len": model.max_model_len,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "block_size": cache.block_size,
                "num_gpu_blocks": cache.num_gpu_blocks,
                "enable_prefix_caching": cache.enable_prefix_caching,
                "gpu_memory_utilization": cache.gpu_memory_utilization,
                "dtype": str(model.dtype),
                "quantization": model.quantization,
                "seed": model.seed,
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
            hardware=_hardware(parallel.world_size_across_dp),
        )


def _entry_points() -> _EntryPoints:
    found: dict[str, Any] = {}
    try:
        for name, places in _PLACES.items():
            found[name] = _look_up(name, places)
        usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.LLM_CLASS
    except ImportError as error:
        raise EngineStartError(
            f"vLLM can't be imported here ({error}): install airflow-provider-vllm-batch[vllm] beside the runner, "
            "or give LocalWorker(python=…) of an environment that has it",
            passing=False,
        ) from error
    return _EntryPoints(
        found["make_arg_parser"],
        found["build_async_engine_client"],
        found["build_app"],
        found["init_app_state"],
        found["FlexibleArgumentParser"],
        usage,
    )


def _look_up(name: str, places: tuple[str, ...]) -> Any:
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not place.startswith(error.name or " "):
                raise  # the module is there, something that it needs is not
    raise ImportError(f"this release has no {name} in {' or '.join(places)}")


class _Handler:
    """vLLM's own handler of one endpoint: the same answers as through the application, for half of its CPU time."""

    def __init__(self, request_type: Any, handle: Callable[..., Any]) -> None:
        self._request_type = request_type
        self._handle = handle

    async def answer(self, body: bytes) -> Reply | None:
        """Return the reply; null where only the application knows how vLLM words it, as for a request it refuses."""
        try:
            answer = await self._handle(self._request_type.model_validate_json(body))
        except Exception as error:  # noqa: BLE001  the application says it again, as vLLM's users know it
            log.debug("asking again through the application: %s", type(error).__name__)
            return None
        status = getattr(getattr(answer, "error", None), "code", None)
        if status is not None:
            return Reply(int(status), answer.model_dump_json().encode())
        return Reply(200, answer.model_dump_json().encode())


def _find_handlers(state: Any) -> dict[str, _Handler]:
    """Return the handlers of hot endpoints, as far as this release has them where we know them to be."""
    found = {}
    for endpoint, (holder, method) in _HANDLERS.items():
        handle = getattr(getattr(state, holder, None), method, None)
        if handle is None:
            continue
        request_type = typing.get_type_hints(handle).get("request")
        if hasattr(request_type, "model_validate_json"):
            found[endpoint] = _Handler(request_type, handle)
    return found


def _render_short_prompts_here(client: Any) -> None:
    """Let vLLM render and tokenise a short prompt at once: two hops through its threads cost more than the work.

    A long prompt still goes through them, so that it holds up nobody.
    """
    executor = getattr(getattr(client, "renderer", None), "_executor", None)
    if executor is None:
        return
    in_a_thread = executor.submit

    def submit(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not _is_short.get():
            return in_a_thread(work, *args, **kwargs)  # type: ignore[no-any-return]
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            done.set_exception(error)
        return done

    executor.submit = submit


def _without_nulls(body: bytes) -> bytes:
    """Drop parameters that are null: it means that they are not set, but vLLM refuses it for some of them."""
    if b"null" not in body:
        return body
    members = _decode_members(body)
    kept = {name: value for name, value in members.items() if bytes(value) != b"null"}
    return body if len(kept) == len(members) else msgspec.json.encode(kept)


def _counters(*names: str) -> list[int | None]:
    """Return counters of vLLM's own statistics in this process, summed over their labels; null where there is none."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name in names:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return [int(found[name]) if name in found else None for name in names]


def _end_with_us() -> None:
    """Let the engine's processes end when this one does, however it dies."""
    os.environ[parent_death.MARK] = str(os.getpid())
    if (plugins := os.environ.get("VLLM_PLUGINS")) is not None and parent_death.PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{parent_death.PLUGIN}" if plugins else parent_death.PLUGIN


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _version() -> str | None:
    import vllm

    version = getattr(vllm, "__version__", None)
    return str(version) if version else None


def _hardware(devices: int) -> Hardware:
    from vllm.platforms import current_platform

    on_gpu = bool(current_platform.is_cuda_alike())
    return Hardware(
        gpu_name=current_platform.get_device_name() if on_gpu else None,
        gpu_count=devices if on_gpu else 0,
        cpu_count=os.cpu_count(),
    )
