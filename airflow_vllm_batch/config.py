"""The ``[vllm_batch]`` section of Airflow's configuration, read here and nowhere else."""

from __future__ import annotations

try:
    from airflow.sdk.configuration import conf
except ImportError:  # Airflow before 3.2
    from airflow.configuration import conf

SECTION = "vllm_batch"


def poll_interval() -> float:
    """Seconds between two looks at a running batch."""
    return float(conf.getfloat(SECTION, "poll_interval", fallback=10.0))


def default_deferrable() -> bool:
    """Whether a task defers that says nothing of it."""
    if (ours := conf.get(SECTION, "default_deferrable", fallback=None)) not in {None, ""}:
        return str(ours).strip().lower() in {"1", "t", "true", "y", "yes", "on"}
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False))
