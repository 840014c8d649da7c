"""The OpenAI batch file format: bytes to rows or faults. Shared by both sides; imports neither."""

from airflow_vllm_batch.batchfile.checks import Checker
from airflow_vllm_batch.batchfile.encode import encode, one_line
from airflow_vllm_batch.batchfile.lines import Line, LineSplitter
from airflow_vllm_batch.batchfile.reader import InputRejectedError, Tally, ascan, scan, validate
from airflow_vllm_batch.batchfile.rows import BadRow, Fault, Row, Rules

__all__ = [
    "BadRow",
    "Checker",
    "Fault",
    "InputRejectedError",
    "Line",
    "LineSplitter",
    "Row",
    "Rules",
    "Tally",
    "ascan",
    "encode",
    "one_line",
    "scan",
    "validate",
]
