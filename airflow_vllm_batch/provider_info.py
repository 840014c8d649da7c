"""What Airflow discovers of this provider. Airflow calls it while it is itself being imported: imports no Airflow."""

from __future__ import annotations

import logging
from typing import Any

from airflow_vllm_batch import __version__
from airflow_vllm_batch.airflow_version import airflow_problem

_NAME = "vLLM batch"


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata.

    The plugin is no part of it: with lazy discovery off it would be registered twice, which Airflow reports as a
    broken plugin. Its entry point is enough.
    """
    if problem := airflow_problem():
        logging.getLogger(__name__).error(problem)  # an exception here would take all of Airflow down
    return {
        "package-name": "airflow-provider-vllm-batch",
        "name": _NAME,
        "description": "Runs an OpenAI batch file on vLLM as one task, resumable row by row.",
        "versions": [__version__],
        "integrations": [
            {
                "integration-name": _NAME,
                "external-doc-url": "https://docs.vllm.ai/",
                "tags": ["ai"],
            }
        ],
        "operators": [
            {"integration-name": _NAME, "python-modules": ["airflow_vllm_batch.operators.vllm_batch"]},
        ],
        "config": {
            "vllm_batch": {
                "description": "Defaults of VLLMBatchOperator.",
                "options": {
                    "poll_interval": {
                        "description": (
                            "Seconds between two looks at a running batch: one log line and one update of "
                            "the XCom vllm_progress each, where something changed."
                        ),
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": None,
                        "default": "10",
                    },
                    "default_deferrable": {
                        "description": (
                            "Whether tasks defer unless they say otherwise, where their worker can. "
                            "Without a value: [operators] default_deferrable."
                        ),
                        "version_added": "0.1.0",
                        "type": "boolean",
                        "example": "True",
                        "default": None,
                    },
                },
            }
        },
    }
