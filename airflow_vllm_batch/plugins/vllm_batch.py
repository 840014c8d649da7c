"""The Airflow plugin. Every task process of every DAG imports it: nothing heavy may be imported here."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class VLLMBatchPlugin(AirflowPlugin):
    name = "vllm_batch"
