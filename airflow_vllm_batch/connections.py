"""An Airflow connection to store settings. Control plane only; what it returns holds secrets and is never logged.

Connections are read once a try. Their hooks stay alive behind :meth:`Connected.settings`, so that credentials which
end are renewed without asking Airflow again.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit

from airflow.sdk import BaseHook
from airflow.sdk.definitions.connection import Connection
from airflow.sdk.exceptions import AirflowRuntimeError
from pydantic import ValidationError

from airflow_vllm_batch.exceptions import AirflowException, ConnectionUnusableError, ProviderMissingError
from airflow_vllm_batch.storage.settings import (
    AzureSettings,
    GcsSettings,
    HttpSettings,
    LocalSettings,
    S3Settings,
    StoreSettings,
)
from airflow_vllm_batch.storage.uris import StoreKind, parse_uri

log = logging.getLogger(__name__)

BY_SCHEME: Final = "<by scheme>"
"""The default connection of the URI's scheme; ambient credentials where Airflow has none of that name."""

DEFAULT_CONNECTIONS: Mapping[StoreKind, str] = {
    "s3": "aws_default",
    "gcs": "google_cloud_default",
    "azure": "wasb_default",
    "http": "http_default",
}

_HTTP_TYPES = frozenset({"http", "https"})
_HEADERS = frozenset(
    {"accept", "accept-encoding", "accept-language", "authorization", "cookie", "origin", "referer", "user-agent"}
)
_HTTP_OPTIONS = frozenset(
    {
        "allow_redirects",
        "cert",
        "check_response",
        "headers",
        "max_redirects",
        "proxies",
        "proxy",
        "srv_lookup",
        "stream",
        "timeout",
        "token",
        "trust_env",
        "verify",
        "verify_ssl",
    }
)


@dataclass(frozen=True)
class Connected:
    """A URI, and how its store is reached now."""

    uri: str
    """In full, a signed query included; an http path is joined to its connection's base URL."""
    settings: Callable[[], StoreSettings]
    """Builds the settings anew, with renewed credentials where they end; may ask the cloud's token service.

    Raises ``ConnectionUnusableError``.
    """


def connect(uri: str, conn_id: str | None) -> Connected:
    """Find out how to reach a URI.

    :param uri: a URI or local path; with an http connection also a path below its base URL.
    :param conn_id: an Airflow connection, null for ambient credentials, or ``BY_SCHEME``.
    :raises ConnectionUnusableError: where the connection can't be read or does not fit the URI.
    :raises ProviderMissingError: where the package that reads such a connection is not installed.
    :raises ValueError: where the URI can't be split.
    """
    connection = None
    if conn_id is not None and conn_id != BY_SCHEME:
        connection = _read(conn_id)
        if connection.conn_type in _HTTP_TYPES:
            return _http(uri, connection, named=True)
    kind = parse_uri(uri).kind
    if conn_id == BY_SCHEME and (default := DEFAULT_CONNECTIONS.get(kind)):
        connection = _read_default(default, uri_kind=kind)
    match kind:
        case "local":
            if connection is not None:
                raise ConnectionUnusableError(
                    f"connection {conn_id!r} is of type {connection.conn_type!r}, but {uri!r} is a local path: "
                    "write a URI with a scheme, or leave the connection out"
                )
            return Connected(uri, LocalSettings)
        case "http":
            if connection is not None and connection.conn_type not in _HTTP_TYPES:
                raise _wrong_type(connection, uri, "http")
            return _http(uri, connection, named=False) if connection else Connected(uri, HttpSettings)
        case "s3":
            return Connected(uri, _S3(connection).settings)
        case "gcs":
            return Connected(uri, _Gcs(connection).settings)
        case "azure":
            return Connected(uri, lambda: _azure(connection))


def is_http_connection(conn_id: str) -> bool:
    """Whether a connection is of type http, so that a path may stand for a URL.

    :raises ConnectionUnusableError: where it can't be read.
    """
    return _read(conn_id).conn_type in _HTTP_TYPES


def expires_at(settings: StoreSettings) -> datetime | None:
    """When the credentials end; null where they don't, or nobody says when."""
    return getattr(settings, "expires_at", None)


# Reading


def _read(conn_id: str) -> Connection:
    cause: Exception | None
    try:
        return BaseHook.get_connection(conn_id)
    except (AirflowException, AirflowRuntimeError) as error:
        reason, cause = str(error), error
    except (OSError, ValueError, TypeError) as error:
        # A parser quotes what it could not parse, which may be the password.
        reason, cause = f"{type(error).__name__} while it was parsed", None
    raise ConnectionUnusableError(
        f"connection {conn_id!r} can't be read ({reason}): create it in Airflow (Admin, Connections; AIRFLOW_CONN_…; "
        "a secrets backend) or correct the id given to the task"
    ) from cause


def _read_default(conn_id: str, *, uri_kind: StoreKind) -> Connection | None:
    try:
        return BaseHook.get_connection(conn_id)
    except (AirflowException, AirflowRuntimeError) as error:
        log.info("no connection %s (%s): ambient credentials are used for %s", conn_id, error, uri_kind)
        return None


def _wrong_type(connection: Connection, uri: str, wanted: str) -> ConnectionUnusableError:
    return ConnectionUnusableError(
        f"connection {connection.conn_id!r} is of type {connection.conn_type!r}, but {uri.partition('://')[0]}:// "
        f"needs one of type {wanted!r}: give another connection id"
    )


def _require(module: str, extra: str, uri_scheme: str) -> None:
    parents = [module.rpartition(".")[0], module]
    try:
        found = all(importlib.util.find_spec(name) is not None for name in parents)
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ProviderMissingError(f"{uri_scheme}:// needs {module}, which is not installed here: pip install {extra}")


def _build(connection_name: str, build: Callable[[], StoreSettings]) -> StoreSettings:
    try:
        return build()
    except ValidationError as error:
        faults = "; ".join(fault["msg"] for fault in error.errors(include_input=False, include_url=False))
        raise ConnectionUnusableError(f"connection {connection_name} does not fit: {faults}") from None


# S3


class _S3:
    """Settings from an ``aws`` connection, or from the chain of this machine, by Amazon's provider."""

    def __init__(self, connection: Connection | None) -> None:
        _require("airflow.providers.amazon", "'airflow-provider-vllm-batch[amazon]'", "s3")
        from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook

        if connection is not None and connection.conn_type not in {"aws", "s3"}:
            raise _wrong_type(connection, "s3://", "aws")
        self._name = repr(connection.conn_id) if connection is not None else "(ambient)"
        # The hook warns and goes on with ambient credentials where a connection is missing: ours was read before.
        hook = AwsGenericHook(aws_conn_id=connection.conn_id if connection is not None else None, client_type="s3")
        self._extra: dict[str, Any] = hook.conn_config.extra_config
        self._service: dict[str, Any] = hook.conn_config.get_service_config("s3")
        self._endpoint: str | None = hook.conn_config.get_service_endpoint_url("s3")
        self._verify: bool | str | None = hook.verify
        self._config: Any = hook.config
        session = self._guarded(lambda: hook.get_session(region_name=hook.region_name))
        self._region: str | None = hook.region_name or session.region_name
        self._credentials: Any = self._guarded(session.get_credentials)

    def settings(self) -> StoreSettings:
        return _build(self._name, self._settings)

    def _settings(self) -> S3Settings:
        return S3Settings(
            **self._identity(),
            **self._encryption(),
            **_verification(self._verify),
            proxy_url=self._proxy(),
            region=self._region,
            endpoint_url=self._endpoint,
            addressing_style="virtual" if (self._config.s3 or {}).get("addressing_style") == "virtual" else "path",
        )

    def _identity(self) -> dict[str, Any]:
        if self._config.signature_version is not None and not isinstance(self._config.signature_version, str):
            return {"anonymous": True}  # botocore.UNSIGNED, the one value that is no string
        if self._credentials is None:
            raise ConnectionUnusableError(
                f"connection {self._name} holds no AWS keys, and neither do environment, profile or role of this "
                "machine: put access key and secret into the connection's login and password, or a role_arn, or "
                "config_kwargs {'signature_version': 'unsigned'} for a public bucket"
            )
        frozen = self._guarded(self._credentials.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "session_token": frozen.token or None,
            # botocore shows it nowhere else; absent for keys that don't end.
            "expires_at": getattr(self._credentials, "_expiry_time", None),
        }

    def _encryption(self) -> dict[str, Any]:
        arguments = {**(self._extra.get("extra_args") or {}), **(self._service.get("extra_args") or {})}
        return {"sse": arguments.get("ServerSideEncryption"), "sse_kms_key_id": arguments.get("SSEKMSKeyId")}

    def _proxy(self) -> str | None:
        scheme = urlsplit(self._endpoint).scheme if self._endpoint else "https"
        proxies = self._config.proxies or {}
        return proxies.get(scheme)

    def _guarded(self, ask: Callable[[], Any]) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

        try:
            return ask()
        except (BotoCoreError, ClientError, AirflowException) as error:
            raise ConnectionUnusableError(
                f"connection {self._name} gives no AWS credentials ({type(error).__name__}: {error}): "
                "check its keys, role and profile"
            ) from error


def _verification(verify: object) -> dict[str, Any]:
    """Return what ``verify`` means in the requests library: a bool, or the path of a bundle."""
    if verify is None or verify is True:
        return {}
    if verify is False or str(verify).strip().lower() in {"false", "0", "no"}:
        return {"verify": False}
    if str(verify).strip().lower() in {"true", "1", "yes"}:
        return {}
    return {"ca_bundle": str(verify)}


# Google Cloud and Azure: what their hooks give, as a token or key


class _Gcs:
    def __init__(self, connection: Connection | None) -> None:
        _require("airflow.providers.google", "apache-airflow-providers-google", "gs")
        from airflow.providers.google.common.hooks.base_google import GoogleBaseHook

        self._name = repr(connection.conn_id) if connection is not None else "(ambient)"
        hook = GoogleBaseHook(gcp_conn_id=connection.conn_id if connection is not None else None)
        self._credentials: Any = hook.get_credentials()

    def settings(self) -> StoreSettings:
        from google.auth.exceptions import GoogleAuthError  # type: ignore[import-untyped]
        from google.auth.transport.requests import Request  # type: ignore[import-untyped]

        try:
            self._credentials.refresh(Request())
        except GoogleAuthError as error:
            raise ConnectionUnusableError(
                f"connection {self._name} gives no Google token ({error}): check its key file or service account"
            ) from error
        ends: datetime | None = self._credentials.expiry
        return _build(
            self._name,
            lambda: GcsSettings(
                bearer_token=self._credentials.token,
                # google.auth's times are naive and in UTC.
                expires_at=ends.isoformat() + "Z" if ends else None,
            ),
        )


def _azure(connection: Connection | None) -> StoreSettings:
    """Read a ``wasb`` connection as the Microsoft provider does."""
    _require("airflow.providers.microsoft.azure", "apache-airflow-providers-microsoft-azure", "abfs")
    if connection is None:
        return AzureSettings(ambient=True)
    extra = connection.extra_dejson
    host = urlsplit(connection.host or "").hostname if "://" in (connection.host or "") else None
    account = host.partition(".")[0] if host else None
    return _build(
        repr(connection.conn_id),
        lambda: AzureSettings(
            account_name=account or (None if extra.get("tenant_id") else connection.login),
            sas_token=extra.get("sas_token"),
            tenant_id=extra.get("tenant_id"),
            client_id=connection.login if extra.get("tenant_id") else None,
            client_secret=connection.password if extra.get("tenant_id") else None,
            account_key=None if extra.get("tenant_id") or extra.get("sas_token") else connection.password,
        ),
    )


# HTTP


def _http(uri: str, connection: Connection, *, named: bool) -> Connected:
    base = _base_url(connection)
    if "://" not in uri:
        # Exactly one slash, however the two are written; the rest of the path stays as it is.
        return Connected(f"{base.rstrip('/')}/{uri.lstrip('/')}", _http_settings(connection))
    if not uri.startswith(("http://", "https://")):
        raise ConnectionUnusableError(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r} and can't open "
            f"{uri.partition('://')[0]}:// URIs: give another connection id"
        )
    if _origin(uri) == _origin(base):
        return Connected(uri, _http_settings(connection))
    if named:
        raise ConnectionUnusableError(
            f"connection {connection.conn_id!r} is for {_shown_origin(base)}, the URL is on {_shown_origin(uri)}: its "
            "credentials are not sent to another host. Give the URL's own connection, or None where it needs none"
        )
    return Connected(uri, HttpSettings)


def _base_url(connection: Connection) -> str:
    host = connection.host or ""
    if not host:
        raise ConnectionUnusableError(f"connection {connection.conn_id!r} names no host: fill in its host field")
    base = host if "://" in host else f"{connection.schema or connection.conn_type}://{host}"
    parts = urlsplit(base)
    if connection.port and parts.port is None:
        base = f"{parts.scheme}://{parts.netloc}:{connection.port}{parts.path}"
    return base


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _shown_origin(url: str) -> str:
    scheme, host, port = _origin(url)
    return f"{scheme}://{host}:{port}"


def _http_settings(connection: Connection) -> Callable[[], StoreSettings]:
    extra = connection.extra_dejson
    for unsupported in ("cert", "srv_lookup"):
        if extra.get(unsupported):
            raise ConnectionUnusableError(
                f"connection {connection.conn_id!r} sets {unsupported!r} in its extra, which is not supported for files"
            )
    proxies = extra.get("proxies", extra.get("proxy"))
    proxy = proxies.get(urlsplit(_base_url(connection)).scheme) if isinstance(proxies, dict) else proxies
    timeout = extra.get("timeout")
    settings = _build(
        repr(connection.conn_id),
        lambda: HttpSettings(
            headers=_headers(connection),
            login=connection.login or None,
            password=connection.password if connection.login else None,
            token=extra.get("token"),
            proxy_url=proxy,
            **({"request_timeout_seconds": timeout} if isinstance(timeout, int | float) and timeout > 0 else {}),
            **_verification(extra.get("verify", extra.get("verify_ssl"))),
        ),
    )
    return lambda: settings


def _headers(connection: Connection) -> dict[str, str]:
    """Return the headers of a connection's extra: options of the requests library are none, and none is guessed."""
    extra = connection.extra_dejson
    given = extra.get("headers")
    headers = {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    for name, value in extra.items():
        if name.lower() in _HEADERS or "-" in name:
            headers[name] = str(value)
        elif name not in _HTTP_OPTIONS:
            log.warning(
                "connection %s: extra %r is no header that we know and is not sent; put headers under 'headers'",
                connection.conn_id,
                name,
            )
    return headers
