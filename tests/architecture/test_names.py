"""Names that others resolve at run time: Airflow's provider metadata and the entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_vllm_batch.provider_info import get_provider_info

PACKAGE = "airflow_vllm_batch"
DISTRIBUTION = "airflow-provider-vllm-batch"


@pytest.fixture(autouse=True)
def _airflow_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path_factory.mktemp("airflow")))


def dotted_names(value: Any) -> Iterator[str]:
    """Yield every string that names something of ours, wherever it stands."""
    match value:
        case dict():
            for member in value.values():
                yield from dotted_names(member)
        case list() | tuple():
            for member in value:
                yield from dotted_names(member)
        case str() if value.startswith(f"{PACKAGE}."):
            yield value


def resolve(name: str) -> Any:
    """Import a module, or the attribute of one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def test_every_dotted_name_in_the_provider_metadata_resolves() -> None:
    names = list(dotted_names(get_provider_info()))

    assert f"{PACKAGE}.operators.vllm_batch" in names
    for name in names:
        assert resolve(name) is not None


def test_a_name_that_is_wrong_would_be_found() -> None:
    with pytest.raises(AttributeError):
        resolve(f"{PACKAGE}.provider_info.nothing")
    assert list(dotted_names({"a": [{"b": f"{PACKAGE}.x"}], "c": "elsewhere.y"})) == [f"{PACKAGE}.x"]


def test_every_entry_point_of_the_distribution_resolves() -> None:
    points = importlib.metadata.distribution(DISTRIBUTION).entry_points

    assert {point.group for point in points} >= {"console_scripts", "apache_airflow_provider", "airflow.plugins"}
    for point in points:
        assert point.load() is not None


def test_the_metadata_says_what_the_package_is_called_everywhere_else() -> None:
    info = get_provider_info()

    assert info["package-name"] == DISTRIBUTION
    assert info["versions"] == [importlib.import_module(PACKAGE).__version__]
