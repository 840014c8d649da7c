"""``python -m airflow_vllm_batch.cli``: the same as the ``vllm-batch`` command."""

import sys

from airflow_vllm_batch.cli import main

sys.exit(main())
