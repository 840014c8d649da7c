"""The runner, killed with its whole process group at one exact moment: ``--dies-at MOMENT``, then its own arguments."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from airflow_vllm_batch.runner import pipeline
from airflow_vllm_batch.runner.__main__ import main
from airflow_vllm_batch.runner.engine.echo_engine import EchoEngine
from airflow_vllm_batch.storage.local import LocalStore


def die(*_: object, **__: object) -> NoReturn:
    os.killpg(os.getpgid(0), signal.SIGKILL)
    raise AssertionError


def _put(original: Any, part: str, count: int, *, after: bool) -> Any:
    """Return a put that dies at the ``count``-th object whose name has this part."""
    left = count

    async def put(self: LocalStore, name: str, *arguments: Any) -> Any:
        nonlocal left
        left -= part in name
        if part in name and not left and not after:
            die()
        done = await original(self, name, *arguments)
        if part in name and not left:
            die()
        return done

    return put


def _at_put(method: str, part: str, count: int = 1, *, after: bool = False) -> Callable[[], None]:
    return lambda: setattr(LocalStore, method, _put(getattr(LocalStore, method), part, count, after=after))


MOMENTS: dict[str, Callable[[], None]] = {
    "staging": lambda: setattr(pipeline, "take_in", die),
    "engine load": lambda: setattr(EchoEngine, "start", die),
    "first row": lambda: setattr(EchoEngine, "send", die),
    "before a segment": _at_put("put_new", "/segments/", 3),
    "after a segment": _at_put("put_new", "/segments/", 3, after=True),
    "merge": lambda: setattr(pipeline, "merge", die),
    "before the upload": _at_put("put_file", "output.jsonl"),
    "between two uploads": _at_put("put_file", "output.jsonl", after=True),
    "before the manifest": _at_put("put", "manifest.json"),
    "after the manifest": _at_put("put", "manifest.json", after=True),
}

if __name__ == "__main__":
    MOMENTS[sys.argv[sys.argv.index("--dies-at") + 1]]()
    sys.exit(main([argument for argument in sys.argv[1:] if argument != "--dies-at" and argument not in MOMENTS]))
