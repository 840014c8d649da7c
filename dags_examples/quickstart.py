"""A batch file in a bucket, answered by vLLM on the machine of the Airflow worker, and read by the next task."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from airflow.sdk import DAG, task

from airflow_vllm_batch.operators.vllm_batch import VLLMBatchOperator
from airflow_vllm_batch.workers import LocalWorker

CONNECTION = os.environ.get("QUICKSTART_CONN_ID", "aws_default")
FOLDER = os.environ.get("QUICKSTART_FOLDER", "s3://quickstart")
MODEL = os.environ.get("QUICKSTART_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")

with DAG("quickstart", schedule=None, tags=["vllm"]):
    batch = VLLMBatchOperator(
        task_id="batch",
        model=MODEL,
        input_uri=f"{FOLDER}/quickstart.jsonl",
        output_uri=f"{FOLDER}/{{{{ run_id }}}}/",
        input_conn_id=CONNECTION,
        output_conn_id=CONNECTION,
        engine_args={"max_model_len": 1024, "enforce_eager": True, "gpu_memory_utilization": 0.3},
        served_model_names="smollm2",
        worker=LocalWorker(env_vars={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}),
        allowed_failures=1,
    )

    @task
    def show(uris: dict[str, str], counts: dict[str, Any], usage: dict[str, Any]) -> None:
        """Read the results where the batch left them, and print them."""
        for row in read_rows(uris["output"]):
            print(f"{row['custom_id']:>18}: {answer(row['response']['body'])!r}")
        for row in read_rows(uris["errors"]):
            print(f"{row['custom_id'] or '(no custom_id)':>18}: {row['error']['code']}: {row['error']['message']}")
        print(f"{'counts':>18}: {json.dumps(counts)}")
        print(f"{'tokens':>18}: {json.dumps(usage)}")
        for name, uri in uris.items():
            print(f"{name:>18}: {uri}")

    show(
        uris={name: batch.output[f"{name}_uri"] for name in ("output", "errors", "manifest")},
        counts=batch.output["counts"],
        usage=batch.output["usage"],
    )


def read_rows(uri: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an output file, read through the same connection."""
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook

    bucket, _, key = uri.removeprefix("s3://").partition("/")
    lines = S3Hook(CONNECTION).read_key(key, bucket).split("\n")  # splitlines() would also split inside of answers
    yield from (json.loads(line) for line in lines if line)


def answer(body: dict[str, Any]) -> str:
    """Return the text of a chat completion or of a completion."""
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])
