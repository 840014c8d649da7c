"""What the control plane and the runner agree on: versioned documents, object names and exit codes.

Imports pydantic and the standard library, nothing else.
"""

from airflow_vllm_batch.contract.attempt import AttemptRecord
from airflow_vllm_batch.contract.base import CONTRACT_VERSION, ContractVersionError
from airflow_vllm_batch.contract.exit_codes import ExitCode
from airflow_vllm_batch.contract.layout import CancelRequest, Lease, RunLayout, RunOwner
from airflow_vllm_batch.contract.manifest import (
    Answers,
    Counts,
    ErrorGroup,
    Manifest,
    OutputFile,
    Usage,
    Verdict,
)
from airflow_vllm_batch.contract.progress import Phase, Progress
from airflow_vllm_batch.contract.rows import ErrorCode, Outcome, ResultRow, SegmentRow
from airflow_vllm_batch.contract.spec import BatchSpec, EngineSpec, InputFile, ModelSpec, OutputTarget, RowPolicy

__all__ = [
    "CONTRACT_VERSION",
    "Answers",
    "AttemptRecord",
    "BatchSpec",
    "CancelRequest",
    "ContractVersionError",
    "Counts",
    "EngineSpec",
    "ErrorCode",
    "ErrorGroup",
    "ExitCode",
    "InputFile",
    "Lease",
    "Manifest",
    "ModelSpec",
    "Outcome",
    "OutputFile",
    "OutputTarget",
    "Phase",
    "Progress",
    "ResultRow",
    "RowPolicy",
    "RunLayout",
    "RunOwner",
    "SegmentRow",
    "Usage",
    "Verdict",
]
