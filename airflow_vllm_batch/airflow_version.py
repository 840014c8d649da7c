"""Which Airflow this provider needs, told plainly. Imports no Airflow: it has to work where there is none."""

from __future__ import annotations

import importlib.metadata
import re

NEEDED = (3, 1, 3)
_NEEDED_TEXT = ".".join(map(str, NEEDED))


def airflow_problem() -> str | None:
    """Return what is wrong with the installed Airflow and what to do; null where it fits."""
    try:
        found = importlib.metadata.version("apache-airflow-core")
    except importlib.metadata.PackageNotFoundError:
        try:
            found = importlib.metadata.version("apache-airflow")
        except importlib.metadata.PackageNotFoundError:
            return (
                "airflow_vllm_batch's operators need Apache Airflow, and it is not installed here: "
                "pip install 'airflow-provider-vllm-batch[airflow]'. The command line (vllm-batch) works without it"
            )
    return version_problem(found)


def version_problem(found: str) -> str | None:
    """Return what is wrong with an Airflow of this version; null where it fits."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if numbers >= NEEDED:
        return None
    return (
        f"airflow-provider-vllm-batch needs Apache Airflow {_NEEDED_TEXT} or later, found {found}: "
        f"pip install 'apache-airflow>={_NEEDED_TEXT}'"
    )


def require_airflow() -> None:
    """Raise ImportError with a plain sentence where Airflow is missing or too old."""
    if problem := airflow_problem():
        raise ImportError(problem)
