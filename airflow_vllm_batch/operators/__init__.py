from airflow_vllm_batch.airflow_version import require_airflow

require_airflow()
