"""The run folder that a command's OUTPUT names."""

from __future__ import annotations

import argparse

from airflow_vllm_batch.cli.access import absolute, open_access
from airflow_vllm_batch.cli.errors import UsageError
from airflow_vllm_batch.contract import OutputTarget
from airflow_vllm_batch.contract.layout import default_state_uri
from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.settings import StoreSettingsError


def open_run_folder(arguments: argparse.Namespace) -> RunFolder:
    """Return the folder that ``output``, ``state`` and ``store`` of a command name; nothing is contacted.

    :raises UsageError: where they name none.
    """
    output_uri = without_query(absolute(arguments.output))
    state = absolute(arguments.state) if arguments.state else default_state_uri(output_uri)
    if state is None:
        raise UsageError("the state of an http(s) output lies elsewhere: give --state")
    state = state if state.endswith("/") else f"{state}/"
    access = open_access(arguments.store, (arguments.output,))
    try:
        return RunFolder(access, OutputTarget(uri=output_uri, state_uri=state))
    except (StoreSettingsError, ValueError) as error:
        raise UsageError(str(error)) from error
