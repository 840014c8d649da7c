"""An output by PUT to a signed URL that is refused at the end of a run: nothing is lost, nothing runs again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.commands import vllm_batch
from tests.support.runs import chat, write_lines


@dataclass
class Receiver:
    """Takes a PUT whose query is the right one, and says that any other has expired."""

    url: str = ""
    signature: str = "fresh"
    puts: list[str] = field(default_factory=list)
    received: bytes | None = None


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.puts.append(self.path)
            refused = not self.path.endswith(f"?sig={found.signature}")
            if not refused:
                found.received = body
            self.send_response(403 if refused else 200)
            answer = (
                b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>" if refused else b""
            )
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}/out.jsonl"
        yield found
        server.shutdown()


def test_an_expired_url_keeps_the_results_and_a_fresh_one_uploads_them_without_an_engine(
    tmp_path: Path, receiver: Receiver
) -> None:
    write_lines(tmp_path / "in.jsonl", [chat("a", "one"), chat("b", "two"), "{broken"])
    arguments = ("--state", "state/", "--model", "m", "--engine", "echo", "--allowed-failures", "1")
    old = f"{receiver.url}?sig=verysecretold"
    done = vllm_batch("run", "-i", "in.jsonl", "-o", old, *arguments, cwd=tmp_path)
    assert done.code == 69, done.err
    assert "status 403" in done.err
    assert "run the same command again (with a fresh URL where a signed one was refused)" in done.err
    assert receiver.puts == ["/out.jsonl?sig=verysecretold"]

    done = vllm_batch("run", "-i", "in.jsonl", "-o", f"{receiver.url}?sig=fresh", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "engine ready" not in done.err
    assert receiver.received is not None
    rows = [json.loads(line) for line in receiver.received.splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", "b", None]
    manifest = json.loads((tmp_path / "state" / "manifest.json").read_text())
    assert (manifest["rows_reused"], manifest["outputs"][0]["status"]) == (2, 200)
    written = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert not [data for data in written if b"verysecretold" in data or b"sig=fresh" in data]


def test_a_url_that_has_expired_already_is_refused_before_anything_runs(tmp_path: Path, receiver: Receiver) -> None:
    write_lines(tmp_path / "in.jsonl", [chat("a", "one")])
    url = f"{receiver.url}?X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature=secret"
    done = vllm_batch(
        "run", "-i", "in.jsonl", "-o", url, "--state", "state/", "--model", "m", "--engine", "echo", cwd=tmp_path
    )
    assert (done.code, "expired at 2026-01-01T00:01:00Z" in done.err) == (69, True), done.err
    assert (receiver.puts, (tmp_path / "state").exists()) == ([], False)
