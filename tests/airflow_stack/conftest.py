"""One real Airflow for all tests of this folder, with a connection to the S3 server of the session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import demo
from tests.support.airflow_stack import AirflowStack
from tests.support.seaweed import SeaweedServer

DAGS = Path(__file__).parent / "dags"


@pytest.fixture(scope="session")
def airflow_stack(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedServer) -> Iterator[AirflowStack]:
    home = tmp_path_factory.mktemp("airflow")
    dags = shutil.copytree(DAGS, home / "dags", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(demo.DAG_FILE, dags)
    connection = demo.aws_connection(s3_server)
    demo.upload_input(s3_server)
    stack = AirflowStack(
        home,
        dags,
        connections={"aws_batches": connection, demo.CONNECTION: connection},
        environment=demo.ENVIRONMENT,
    )
    with stack:
        yield stack
