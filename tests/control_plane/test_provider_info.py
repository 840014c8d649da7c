"""What Airflow discovers of the provider."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest

from tests.support import task  # noqa: F401  before Airflow

import airflow  # isort: skip

from airflow_vllm_batch import config
from airflow_vllm_batch.airflow_version import version_problem
from airflow_vllm_batch.provider_info import get_provider_info


def test_the_metadata_is_what_airflows_schema_asks_for() -> None:
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_every_module_that_the_metadata_names_can_be_imported() -> None:
    for entry in get_provider_info()["operators"]:
        for module in entry["python-modules"]:
            importlib.import_module(module)


def test_the_plugin_is_registered_by_its_entry_point_alone() -> None:
    assert "plugins" not in get_provider_info()
    (found,) = [point for point in entry_points(group="airflow.plugins") if point.name == "vllm_batch"]
    assert found.load().name == "vllm_batch"


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, airflow.plugins_manager, airflow_vllm_batch.plugins.vllm_batch\n"
        "print(sorted(name for name in sys.modules if name.startswith('airflow_vllm_batch')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # Airflow itself imports the metadata, which imports nothing either.
    assert set(ast.literal_eval(shown.strip().splitlines()[-1])) <= {
        "airflow_vllm_batch",
        "airflow_vllm_batch.airflow_version",
        "airflow_vllm_batch.plugins",
        "airflow_vllm_batch.plugins.vllm_batch",
        "airflow_vllm_batch.provider_info",
    }


def test_every_option_of_the_section_is_read_by_the_configuration_module() -> None:
    source = Path(config.__file__).read_text()
    for option in get_provider_info()["config"]["vllm_batch"]["options"]:
        assert f'"{option}"' in source


@pytest.mark.parametrize("version", ["3.1.3", "3.1.10", "3.2.0rc1", "3.3.2", "4.0.0"])
def test_an_airflow_that_fits_is_no_problem(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["2.11.0", "3.0.6", "3.1.2"])
def test_an_older_airflow_is_named_with_what_to_install(version: str) -> None:
    assert version_problem(version) == (
        f"airflow-provider-vllm-batch needs Apache Airflow 3.1.3 or later, found {version}: "
        "pip install 'apache-airflow>=3.1.3'"
    )


def test_operators_without_airflow_say_what_is_missing() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name.startswith('apache-airflow'): raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import airflow_vllm_batch.operators"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "need Apache Airflow, and it is not installed here" in done.stderr
