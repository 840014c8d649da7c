"""The store file (``--store FILE``): how to reach each store, with the secrets that no spec holds.

Secrets are no part of a repr, a str, an error or an ordinary dump; only :meth:`StoreFile.to_secret_bytes` shows them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    model_validator,
)

from airflow_vllm_batch.contract.base import Authored, AuthoredDocument

_REVEAL: Final = object()


class StoreSettingsError(ValueError):
    """The store file can't be read, or has no fitting entry for a store; the message holds no secret."""


def _show_or_mask(value: SecretStr, info: SerializationInfo) -> str:
    return value.get_secret_value() if info.context is _REVEAL else str(value)


Secret = Annotated[SecretStr, PlainSerializer(_show_or_mask, return_type=str)]
"""Masked everywhere but in :meth:`StoreFile.to_secret_bytes`."""


class _Settings(Authored):
    # An error about a neighbouring field would else quote the whole input, secrets included.
    model_config = ConfigDict(hide_input_in_errors=True)


class _Network(_Settings):
    ca_bundle: str | None = None
    """Certificates trusted besides the system's: the path of a PEM file where this runs, or the PEM text itself."""
    verify: bool = True
    """False accepts any certificate."""
    proxy_url: Secret | None = None
    connect_timeout_seconds: float = Field(default=5.0, gt=0)
    request_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long the peer may stay silent, not how long a transfer may take; an upload's parts of 8 MiB count each."""

    def ca_pem(self) -> bytes | None:
        """Return the bundle's PEM bytes.

        :raises StoreSettingsError: where its file can't be read.
        """
        if self.ca_bundle is None:
            return None
        if "-----BEGIN" in self.ca_bundle:
            return self.ca_bundle.encode()
        try:
            return Path(self.ca_bundle).read_bytes()
        except OSError as error:
            raise StoreSettingsError(f"can't read ca_bundle {self.ca_bundle!r}: {error.strerror}") from error


class LocalSettings(_Settings):
    kind: Literal["local"] = "local"


class S3Settings(_Network):
    """Access by keys, by the ambient chain (``ambient``) or without signing (``anonymous``): exactly one of them."""

    kind: Literal["s3"] = "s3"
    access_key_id: str | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    expires_at: AwareDatetime | None = None
    """When the keys end; for messages only, since the store file is read again before that."""
    ambient: bool = False
    """Environment, shared credentials file, web identity, container or instance role of where this runs."""
    anonymous: bool = False
    region: str | None = None
    endpoint_url: str | None = None
    addressing_style: Literal["path", "virtual"] = "path"
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    sse_kms_key_id: str | None = None

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        _check_one_way("s3", keys=self.access_key_id is not None, ambient=self.ambient, anonymous=self.anonymous)
        if self.sse_kms_key_id and self.sse not in {"aws:kms", "aws:kms:dsse"}:
            raise ValueError("sse_kms_key_id goes with sse 'aws:kms' or 'aws:kms:dsse'")
        return self


class GcsSettings(_Network):
    kind: Literal["gcs"] = "gcs"
    service_account_key: Secret | None = None
    """The service account's JSON text."""
    service_account_path: str | None = None
    bearer_token: Secret | None = None
    expires_at: AwareDatetime | None = None
    ambient: bool = False
    anonymous: bool = False
    endpoint_url: str | None = None

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        _check_one_way(
            "gcs",
            service_account_key=self.service_account_key is not None,
            service_account_path=self.service_account_path is not None,
            bearer_token=self.bearer_token is not None,
            ambient=self.ambient,
            anonymous=self.anonymous,
        )
        return self


class AzureSettings(_Network):
    kind: Literal["azure"] = "azure"
    account_name: str | None = None
    """Null where the URI names it (``container@account.…``)."""
    account_key: Secret | None = None
    sas_token: Secret | None = None
    bearer_token: Secret | None = None
    expires_at: AwareDatetime | None = None
    tenant_id: str | None = None
    client_id: str | None = None
    client_secret: Secret | None = None
    ambient: bool = False
    anonymous: bool = False
    endpoint_url: str | None = None

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if self.client_secret is not None and not (self.tenant_id and self.client_id):
            raise ValueError("client_secret needs tenant_id and client_id")
        _check_one_way(
            "azure",
            account_key=self.account_key is not None,
            sas_token=self.sas_token is not None,
            bearer_token=self.bearer_token is not None,
            client_secret=self.client_secret is not None,
            ambient=self.ambient,
            anonymous=self.anonymous,
        )
        return self


class HttpSettings(_Network):
    """Headers, and either a login with password or a bearer token; all optional."""

    kind: Literal["http"] = "http"
    headers: dict[str, Secret] = Field(default_factory=dict)
    login: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    request_timeout_seconds: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _one_identity(self) -> Self:
        if self.login is not None and self.token is not None:
            raise ValueError("give login and password, or token, not both")
        if self.password is not None and self.login is None:
            raise ValueError("password needs login")
        return self


StoreSettings = Annotated[
    LocalSettings | S3Settings | GcsSettings | AzureSettings | HttpSettings, Field(discriminator="kind")
]


class ServerSettings(_Settings):
    """How the ``server`` engine identifies itself to its server."""

    api_key: Secret | None = None
    headers: dict[str, Secret] = Field(default_factory=dict)


class StoreFile(AuthoredDocument):
    """The whole file. ``to_bytes`` masks secrets; what is written is ``to_secret_bytes``."""

    model_config = ConfigDict(hide_input_in_errors=True)

    stores: dict[str, StoreSettings] = Field(default_factory=dict)
    urls: dict[str, Secret] = Field(default_factory=dict)
    """An http(s) URL without its query, as the spec holds it, to the full signed one."""
    server: ServerSettings | None = None

    def to_secret_bytes(self) -> bytes:
        """Return UTF-8 JSON with every secret in clear."""
        return self.model_dump_json(indent=1, exclude_none=True, context=_REVEAL).encode() + b"\n"

    def secrets(self) -> list[str]:
        """Return every secret value, longest first, so that a log can be redacted by plain replacement.

        Of a URL these are the whole, its query, its password and each long value in the query.
        """
        found: set[str] = set()
        for value in _secret_values(self):
            found.add(value)
            if "://" in value:
                found.update(_url_secrets(value))
        found.discard("")
        return sorted(found, key=lambda value: (-len(value), value))


def write_store_file(path: Path, document: StoreFile) -> None:
    """Create or replace the file, 0600, in one step: a reader sees the old bytes or the new ones, in a new inode."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(document.to_secret_bytes())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check_one_way(kind: str, **ways: bool) -> None:
    given = [name for name, present in ways.items() if present]
    if len(given) != 1:
        raise ValueError(f"{kind} settings need exactly one of {', '.join(ways)}; got {', '.join(given) or 'none'}")


def _secret_values(value: Any) -> Iterator[str]:
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secret_values(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _secret_values(item)


def _url_secrets(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    yield parts.query
    if parts.password:
        yield parts.password
    for pair in parts.query.split("&"):
        value = pair.partition("=")[2]
        if len(value) >= 16:  # shorter ones are words and numbers of ordinary log lines
            yield value
