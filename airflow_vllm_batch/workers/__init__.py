"""Where the runner runs."""

from airflow_vllm_batch.workers.base import Worker
from airflow_vllm_batch.workers.local import LocalWorker

__all__ = ["LocalWorker", "Worker"]
