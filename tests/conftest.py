"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.seaweed import SeaweedServer


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """Start one S3 server for the session, with the bucket ``tests``; a test takes a prefix of its own."""
    with SeaweedServer() as server:
        server.create_bucket("tests")
        yield server
