"""A throwaway certificate authority and a server certificate for localhost, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def make_authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return the CA's PEM file and a context for a server on localhost or 127.0.0.1 that it signed."""
    (folder / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {new_key} -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca",
        f"req {new_key} -keyout server.key -out server.csr -subj /CN=localhost",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile extensions",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return folder / "ca.pem", context
