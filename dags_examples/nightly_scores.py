"""Every night the same questions to the same model; the task after it reads where the answers are."""

from airflow.sdk import DAG, task

from airflow_vllm_batch.operators.vllm_batch import VLLMBatchOperator

with DAG("nightly_scores", schedule="@daily"):
    batch = VLLMBatchOperator(
        task_id="score",
        model="Qwen/Qwen2.5-7B-Instruct",
        input_uri="s3://evals/{{ ds }}/requests.jsonl",
        output_uri="s3://evals/{{ ds }}/score/",
        input_conn_id="aws_evals",
        output_conn_id="aws_evals",
        engine_args={"max_model_len": 8192, "tensor_parallel_size": 2},
        allowed_failures=0.01,
    )

    @task
    def grade(output_uri: str) -> None:
        print("answers:", output_uri)

    grade(batch.output["output_uri"])
