"""The operator on http: a path below a connection's base URL, and a signed URL that takes the result."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.task import FakeTaskInstance, chat_row, execute, execute_operator, make_operator  # isort: skip

from airflow_vllm_batch.exceptions import VLLMBatchFailedError

QUERY = "X-Amz-Signature=0123456789abcdef%2F%20+~&b=%7E"
ROWS = "".join(f"{json.dumps(chat_row(name))}\n" for name in ("a", "b")).encode()


class Server(ThreadingHTTPServer):
    """Serves one file and takes any PUT; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, str | None]] = []
        self.put: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name in the standard library
        pass

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("X-Api-Key")))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._answer(200, ROWS)

    def do_GET(self) -> None:
        self._answer(200, ROWS)

    def do_PUT(self) -> None:
        self.server.put[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_path_is_read_below_the_base_url_of_its_connection(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {"conn_type": "http", "host": f"{server.url}/base/", "extra": {"X-Api-Key": "key-12345"}}
    monkeypatch.setenv("AIRFLOW_CONN_FILES", json.dumps(connection))
    outcome = execute(input_uri="/nightly/in.jsonl", input_conn_id="files", output_uri=str(tmp_path / "out"))
    assert outcome.result is not None, outcome.error
    assert outcome.result["counts"]["succeeded"] == 2
    assert {(path, key) for _, path, key in server.asked} == {("/base/nightly/in.jsonl", "key-12345")}
    assert "key-12345" not in (tmp_path / "out/_vllm_batch/1/spec.json").read_text()


def test_a_signed_url_takes_all_rows_and_stays_a_secret(server: Server, tmp_path: Path) -> None:
    source = f"{server.url}/in.jsonl?{QUERY}"
    target = f"{server.url}/result?{QUERY}"
    state = tmp_path / "state"
    op = make_operator(input_uri=source, output_uri=target, state_uri=str(state))
    ti = FakeTaskInstance()
    outcome = execute_operator(op, ti)
    assert outcome.result is not None, outcome.error
    # Every byte of the query arrives as it was signed.
    assert {path for _, path, _ in server.asked} == {f"/in.jsonl?{QUERY}", f"/result?{QUERY}"}
    answers = [json.loads(line) for line in server.put[f"/result?{QUERY}"].splitlines()]
    assert [row["custom_id"] for row in answers] == ["a", "b"]
    assert outcome.result["output_uri"] == f"{server.url}/result"
    assert outcome.result["manifest_uri"] == f"{state}/manifest.json"
    assert op.input_uri == f"{server.url}/in.jsonl?***"
    written = [path for path in state.rglob("*") if path.is_file() and b"0123456789abcdef" in path.read_bytes()]
    assert written == []
    assert "0123456789abcdef" not in json.dumps(ti.xcoms)


def test_an_http_output_without_a_place_for_its_state_is_refused(server: Server) -> None:
    outcome = execute(input_uri=f"{server.url}/in.jsonl", output_uri=f"{server.url}/result?{QUERY}")
    assert isinstance(outcome.error, VLLMBatchFailedError)
    assert "give state_uri" in str(outcome.failure)
    assert server.put == {}
