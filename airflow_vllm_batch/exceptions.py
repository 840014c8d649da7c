"""What a DAG author catches. Whether Airflow retries follows from the type alone."""

from __future__ import annotations

from typing import ClassVar

from airflow_vllm_batch.contract import ExitCode

try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
except ImportError:  # Airflow before 3.2 keeps them in the old place only
    from airflow.exceptions import AirflowException, AirflowFailException  # type: ignore[attr-defined,no-redef]


__all__ = [
    "AirflowException",
    "AirflowFailException",
    "BatchStoppedError",
    "ConnectionUnusableError",
    "ProviderMissingError",
    "VLLMBatchError",
    "VLLMBatchFailedError",
]


class VLLMBatchError(AirflowException):
    """The try did not end as asked; Airflow retries it, and rows that have a result are not run again.

    :param exit_code: as in ``contract.ExitCode``, or the negative number of a signal; null where there was none.
    """

    usual_exit_code: ClassVar[ExitCode | None] = None

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = self.usual_exit_code if exit_code is None else exit_code


class VLLMBatchFailedError(VLLMBatchError, AirflowFailException):
    """Another try would end the same way, so Airflow does not retry."""


class ConnectionUnusableError(VLLMBatchError):
    """An Airflow connection can't be read or does not fit; the message names it, what is wrong and what to do."""

    usual_exit_code = ExitCode.STORAGE


class ProviderMissingError(VLLMBatchFailedError):
    """A package that reads this kind of storage is not installed; the message has the line that installs it."""

    usual_exit_code = ExitCode.USAGE


class BatchStoppedError(VLLMBatchError):
    """The task was told to stop. Finished rows are kept: the next try runs the others."""

    usual_exit_code = ExitCode.RESUMABLE
