"""The operator as a DAG author uses it, with an engine that needs no model. The conf says what differs."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_vllm_batch.operators.vllm_batch import VLLMBatchOperator

CONNECTION = "aws_batches"
CONF = {
    "model": "echo-model",
    "engine": "echo",
    "input_uri": "{{ dag_run.conf['input_uri'] }}",
    "output_uri": "{{ dag_run.conf['output_uri'] }}",
    "input_conn_id": "{{ dag_run.conf.get('input_conn_id', 'aws_batches') }}",
    "output_conn_id": CONNECTION,
}


@task
def read(output_uri: str) -> list[str]:
    """Return the lines of a file in a bucket, read through the connection."""
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook

    bucket, _, key = output_uri.removeprefix("s3://").partition("/")
    return [line for line in S3Hook(CONNECTION).read_key(key, bucket).split("\n") if line]


with DAG("echo_batch", schedule=None):
    batch = VLLMBatchOperator(task_id="batch", **CONF)
    read(batch.output["output_uri"])

with DAG("echo_retry", schedule=None):
    VLLMBatchOperator(
        task_id="batch",
        retries=1,
        retry_delay=timedelta(seconds=1),
        echo_delay_seconds=0.1,
        max_in_flight=2,
        checkpoint_seconds=0.5,
        poll_interval=1.0,
        **CONF,
    )
