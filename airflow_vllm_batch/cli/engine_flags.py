"""vLLM's command-line flags, unread, as the engine arguments of a spec. Knows no flag's meaning, but for names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from airflow_vllm_batch.cli.errors import UsageError
from airflow_vllm_batch.contract.spec import Adapter

_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(?:=.*)?", re.DOTALL)


def engine_args(argv: Sequence[str]) -> dict[str, JsonValue]:
    """Return engine arguments: ``--max-model-len 1024`` becomes ``{"max_model_len": 1024}``, a bare flag True.

    Several values become a list; a short flag keeps its dash. Of a flag given twice the last one counts, as vLLM's
    own parser has it.

    :raises UsageError: for a value that stands behind no flag.
    """
    found: dict[str, JsonValue] = {}
    name: str | None = None
    values: list[JsonValue] = []

    def close() -> None:
        if name is not None:
            found[name] = True if not values else values[0] if len(values) == 1 else list(values)

    for token in argv:
        if _FLAG.fullmatch(token):
            close()
            flag, equals, value = token.partition("=")
            name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else flag
            values = [_typed(value)] if equals else []
        elif name is None:
            raise UsageError(f"unexpected argument {token!r}")
        else:
            values.append(_typed(token))
    close()
    return found


def _typed(text: str) -> JsonValue:
    """Return a number or a JSON object as such, so that a spec says the same as an operator's; else the text."""
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) or (type(value) in (int, float) and json.dumps(value) == text):
        return value
    return text


def served_names(args: dict[str, JsonValue]) -> tuple[str, ...]:
    """Return what the engine is told to call the model; empty where it isn't told."""
    names = args.get("served_model_name")
    if names is None:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else (str(names),)


def adapters(args: dict[str, JsonValue]) -> tuple[Adapter, ...]:
    """Return the adapters of ``--lora-modules``, each ``name=path`` or a JSON object.

    :raises UsageError: where one is neither.
    """
    given = args.get("lora_modules")
    if given is None:
        return ()
    found = []
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, dict) and {"name", "path"} <= item.keys():
            found.append(Adapter(name=str(item["name"]), uri=str(item["path"])))
        elif isinstance(item, str) and "=" in item:
            name, _, path = item.partition("=")
            found.append(Adapter(name=name, uri=path))
        else:
            raise UsageError(f"--lora-modules takes name=path or a JSON object with name and path, got {item!r}")
    return tuple(found)
