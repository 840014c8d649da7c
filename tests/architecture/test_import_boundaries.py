"""What a linter can't see: imports inside functions called at import time, and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.blocked_imports import CHECKOUT, import_all, run_blocked

PACKAGE = "airflow_vllm_batch"
AIRFLOW = ("airflow", "kubernetes", "kubernetes_asyncio")
ENGINE = ("vllm", "torch", "transformers")
RUNNER = f"{PACKAGE}.runner"
THE_ENGINE_ADAPTER = f"{RUNNER}.engine.vllm_engine"
NO_AIRFLOW_SIDE = ("contract", "batchfile", "storage", "evaluation", "cli", "runner")


def modules() -> list[str]:
    """Every module there is: a new one is covered without being listed."""
    found = []
    for path in sorted((CHECKOUT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(CHECKOUT).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in found if not name.endswith(".__main__")]


def without_airflow() -> list[str]:
    return [name for name in modules() if name.split(".")[1:2] and name.split(".")[1] in NO_AIRFLOW_SIDE]


def control_plane() -> list[str]:
    return [name for name in modules() if name not in without_airflow()]


def report(failed: dict[str, str]) -> str:
    return "\n\n".join(f"{name}:\n{trace}" for name, trace in failed.items())


def test_the_blocking_itself_works() -> None:
    blocked = run_blocked("import airflow.sdk", ["airflow"])
    unrelated = run_blocked("import json.tool", ["airflow", "js"])

    assert blocked.returncode != 0
    assert "airflow is blocked here" in blocked.stderr
    assert unrelated.returncode == 0, unrelated.stderr


def test_a_module_that_fails_is_reported_by_name() -> None:
    failed = import_all(["json.tool", "asyncio.events"], ["asyncio"])

    assert set(failed) == {"asyncio.events"}
    assert "asyncio is blocked here" in failed["asyncio.events"]


def test_both_sides_have_modules() -> None:
    assert f"{PACKAGE}.contract.spec" in without_airflow()
    assert f"{PACKAGE}.provider_info" in control_plane()


def test_shared_code_runner_and_command_line_import_where_neither_airflow_nor_an_engine_is_installed() -> None:
    side = [name for name in without_airflow() if name != THE_ENGINE_ADAPTER]

    failed = import_all(side, [*AIRFLOW, *ENGINE])

    assert not failed, report(failed)


def test_the_control_plane_imports_without_an_engine_and_without_the_runner(tmp_path: Path) -> None:
    failed = import_all(control_plane(), [*ENGINE, RUNNER], environment={"AIRFLOW_HOME": str(tmp_path)})

    assert not failed, report(failed)


def test_importing_the_package_imports_nothing_else() -> None:
    child = run_blocked(
        f"before = set(sys.modules); import {PACKAGE}; print(sorted(set(sys.modules) - before))", [*AIRFLOW, *ENGINE]
    )

    assert child.stdout.strip() == f"['__future__', '{PACKAGE}']" or child.stdout.strip() == f"['{PACKAGE}']"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["validate", "--help"], ["status", "--help"]])
def test_the_command_line_explains_itself_where_nothing_heavy_is_installed(arguments: list[str]) -> None:
    child = run_blocked(
        f"from {PACKAGE}.cli import main; sys.argv = ['vllm-batch']; sys.exit(main({arguments!r}))",
        [*AIRFLOW, *ENGINE],
    )

    assert child.returncode == 0, child.stderr
    assert "vllm-batch" in child.stdout


@pytest.mark.parametrize(("content", "status"), [("good", 0), ("", 65)])
def test_validate_works_where_nothing_heavy_is_installed(tmp_path: Path, content: str, status: int) -> None:
    line = (
        '{"custom_id":"a","method":"POST","url":"/v1/chat/completions",'
        '"body":{"model":"m","messages":[{"role":"user","content":"hi"}]}}\n'
    )
    batch = tmp_path / "in.jsonl"
    batch.write_text(line if content else "")

    child = run_blocked(
        f"from {PACKAGE}.cli import main; sys.exit(main(['validate', {str(batch)!r}]))", [*AIRFLOW, *ENGINE]
    )

    assert child.returncode == status, child.stdout + child.stderr
