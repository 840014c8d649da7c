"""What can be told of a task's arguments by themselves. Contacts no store and imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue

from airflow_vllm_batch.contract import ExitCode
from airflow_vllm_batch.contract.spec import Adapter

Mode = Literal["full", "sample", "off"]
StageInput = Literal["auto", "always", "never"]
"""Which inputs are copied into the run folder before the start."""
"""How much of the input is checked before the start."""

_OWN_ARGUMENTS: Final = {
    "model": "model",
    "served_model_name": "served_model_names",
    "seed": "seed",
}
"""Engine arguments that are arguments of the operator."""


class Refusal(Exception):  # noqa: N818  the word of the design; it is an outcome before it is an error
    """Nothing may be started, and another try would find the same."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def engine_arguments(given: object) -> dict[str, JsonValue]:
    """Return vLLM's arguments by their names with underscores, short flags with their dash.

    :raises Refusal: where it is no mapping, a value is no JSON, or a name belongs to the operator.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Refusal(
            ExitCode.USAGE,
            "engine_args must map vLLM's arguments to values, as in {'max_model_len': 8192}; "
            f"got {type(given).__name__}",
        )
    arguments: dict[str, JsonValue] = {}
    for key, value in given.items():
        if not isinstance(key, str) or not key.strip("-"):
            raise Refusal(ExitCode.USAGE, f"engine_args: {key!r} is no name of an argument")
        name = _argument_name(key)
        if name in _OWN_ARGUMENTS:
            raise Refusal(ExitCode.USAGE, f"engine_args: {key!r} is the operator's own argument {_OWN_ARGUMENTS[name]}")
        if name in arguments:
            raise Refusal(ExitCode.USAGE, f"engine_args name {name} twice, with dashes and with underscores")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise Refusal(
                ExitCode.USAGE,
                f"engine_args: {key!r} must be a JSON value (text, number, boolean, list, mapping, None), "
                f"got {type(value).__name__}",
            ) from None
        arguments[name] = value
    return arguments


def _argument_name(key: str) -> str:
    if key.startswith("-") and not key.startswith("--"):
        return key
    return key.removeprefix("--").replace("-", "_")


def check_model(name: str) -> None:
    """Refuse a model path on this machine that holds no model; a hub name is the runner's to resolve."""
    path = Path(name)
    if not path.exists():
        if name.startswith(("/", "./", "../", "~", "file:")) or ("://" not in name and name.count("/") > 1):
            raise Refusal(
                ExitCode.ENGINE_CONFIG,
                f"model {name!r} is a path, and there is nothing on this machine: give an absolute path that exists "
                "where the runner runs, or a hub name such as 'Qwen/Qwen2.5-7B-Instruct'",
            )
        return
    # Mistral's own format has params.json instead.
    if path.is_dir() and not any((path / config).is_file() for config in ("config.json", "params.json")):
        raise Refusal(
            ExitCode.ENGINE_CONFIG,
            f"model {name!r} is a folder without config.json: name the folder that holds config.json and the weights",
        )


def served_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return what ``body.model`` may say; empty for the model's own name."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def adapters(modules: JsonValue) -> tuple[Adapter, ...]:
    """Return the adapters of vLLM's ``lora_modules``, ``name=path`` or objects: rows may name them as their model.

    :raises Refusal: where one is neither.
    """
    found = []
    for module in modules if isinstance(modules, list) else [] if modules is None else [modules]:
        if isinstance(module, dict) and {"name", "path"} <= module.keys():
            found.append(Adapter(name=str(module["name"]), uri=str(module["path"])))
        elif isinstance(module, str) and "=" in module:
            name, _, path = module.partition("=")
            found.append(Adapter(name=name, uri=path))
        else:
            raise Refusal(ExitCode.USAGE, f"engine_args: lora_modules hold name=path or objects, got {module!r}")
    return tuple(found)
