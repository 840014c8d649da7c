"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Airflow, which writes its configuration into its home and obeys these variables.
os.environ["AIRFLOW_HOME"] = str(Path(__file__).parents[1] / ".build" / "airflow")
for _name in [name for name in os.environ if name.startswith(("AIRFLOW__", "AIRFLOW_CONN_"))]:
    del os.environ[_name]

from tests.support.seaweed import SeaweedServer  # noqa: E402  see above


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """Start one S3 server for the session, with the bucket ``tests``; a test takes a prefix of its own."""
    with SeaweedServer() as server:
        server.create_bucket("tests")
        yield server
