"""Run Python in a child process in which some packages can't be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

_BLOCKING = """
import sys
BLOCKED = frozenset({blocked})

def is_blocked(name):
    return any(name == package or name.startswith(package + ".") for package in BLOCKED)

class Blocking:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if is_blocked(name):
            raise ImportError(f"{{name}} is blocked here")

early = sorted(filter(is_blocked, sys.modules))
assert not early, f"imported before anything was asked for: {{early}}"
sys.meta_path.insert(0, Blocking)
"""


def run_blocked(
    code: str,
    blocked: Iterable[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run code where an import of the blocked packages, or of anything below them, raises ImportError."""
    return subprocess.run(
        [sys.executable, "-c", _BLOCKING.format(blocked=json.dumps(sorted(blocked))) + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder or CHECKOUT,
        env={**os.environ, **(environment or {})},
    )


def import_all(
    modules: Iterable[str], blocked: Iterable[str], *, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Import modules one after another in a child, and return what each failed one failed with."""
    code = f"""
import importlib, json, traceback
failed = {{}}
for name in {sorted(modules)!r}:
    try:
        importlib.import_module(name)
    except Exception:
        failed[name] = traceback.format_exc()
print("FAILED " + json.dumps(failed))
"""
    child = run_blocked(code, blocked, environment=environment)
    if child.returncode:
        return {"(the child)": child.stderr}
    line = next(line for line in child.stdout.splitlines() if line.startswith("FAILED "))
    return dict(json.loads(line.removeprefix("FAILED ")))
