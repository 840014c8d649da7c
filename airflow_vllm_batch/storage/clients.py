"""Build obstore clients from store settings: credentials that are asked for again, certificates, proxy, time limits."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from airflow_vllm_batch.storage.settings import (
    AzureSettings,
    GcsSettings,
    S3Settings,
    StoreSettings,
    StoreSettingsError,
)
from airflow_vllm_batch.storage.uris import Location

if TYPE_CHECKING:
    from obstore.store import (
        AzureConfig,
        AzureCredential,
        ClientConfig,
        GCSConfig,
        GCSCredential,
        RetryConfig,
        S3Config,
        S3Credential,
    )

ObstoreClient: TypeAlias = S3Store | GCSStore | AzureStore

# The whole request has no limit of its own, or a large object could never be streamed; silence has.
_NO_LIMIT = timedelta(days=30)
# A dead endpoint fails within tens of seconds; waiting out an outage is the caller's business, who knows what waits.
_RETRY: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=45),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}
# obstore keeps a credential until it nearly ends, and asks again for each request once that is less than 5 minutes:
# so the store file is looked at for each request, and renewed keys are used at once.
_ASK_AGAIN = timedelta(seconds=30)

_Kind = TypeVar("_Kind", S3Settings, GcsSettings, AzureSettings)


def build_client(location: Location, current: Callable[[], StoreSettings]) -> ObstoreClient:
    """Return a client for the location's bucket. Nothing is contacted.

    :param current: returns the settings as they are now; called at once, and for each request's credentials.
    :raises StoreSettingsError: where settings and location don't fit or the client refuses them.
    """
    settings = current()
    try:
        match location.kind, settings:
            case "s3", S3Settings():
                return _s3(location, settings, current)
            case "gcs", GcsSettings():
                return _gcs(location, settings, current)
            case "azure", AzureSettings():
                return _azure(location, settings, current)
    except (BaseError, ValueError) as error:
        raise StoreSettingsError(
            f"no client for {location.kind} {location.container!r} can be made of its settings "
            f"({type(error).__name__}): check region, endpoint_url, ca_bundle and proxy_url"
        ) from (error if isinstance(error, StoreSettingsError) else None)
    raise StoreSettingsError(f"settings of kind {settings.kind!r} can't open a {location.kind} URI")


def _s3(location: Location, settings: S3Settings, current: Callable[[], StoreSettings]) -> S3Store:
    config: S3Config = {
        "virtual_hosted_style_request": settings.addressing_style == "virtual",
        "disable_bulk_delete": True,  # single deletes need no extra right and work on every S3 look-alike
    }
    endpoint = settings.endpoint_url
    if endpoint is not None:
        if settings.addressing_style == "virtual":
            scheme, _, host = endpoint.partition("://")
            endpoint = f"{scheme}://{location.container}.{host}"
        config["endpoint"] = endpoint.removesuffix("/")
    if settings.sse:
        config["server_side_encryption"] = settings.sse
    if settings.sse_kms_key_id:
        config["sse_kms_key_id"] = settings.sse_kms_key_id
    if settings.anonymous:
        config["skip_signature"] = True
    provider = None
    if settings.access_key_id is not None:
        provider = _provider(S3Settings, current, _s3_credential)
    elif settings.ambient and (shared := _shared_profile()) is not None:
        provider = lambda: shared  # noqa: E731  a constant
    if region := settings.region or _ambient_region():
        config["region"] = region
    return S3Store(
        location.container,
        config=config,
        client_options=_client_options(settings, default_ca="AWS_CA_BUNDLE"),
        retry_config=_RETRY,
        credential_provider=provider,
    )


def _s3_credential(settings: S3Settings) -> S3Credential:
    if settings.access_key_id is None or settings.secret_access_key is None:
        raise StoreSettingsError("the store file no longer holds keys for this store")
    return {
        "access_key_id": settings.access_key_id,
        "secret_access_key": settings.secret_access_key.get_secret_value(),
        "token": settings.session_token.get_secret_value() if settings.session_token else None,
        "expires_at": datetime.now(UTC) + _ASK_AGAIN,
    }


def _gcs(location: Location, settings: GcsSettings, current: Callable[[], StoreSettings]) -> GCSStore:
    config: GCSConfig = {}
    if settings.service_account_key:
        config["service_account_key"] = settings.service_account_key.get_secret_value()
    if settings.service_account_path:
        config["service_account"] = settings.service_account_path
    if settings.anonymous:
        config["skip_signature"] = True
    if settings.endpoint_url:
        config["base_url"] = settings.endpoint_url.removesuffix("/")

    def credential(now: GcsSettings) -> GCSCredential:
        if now.bearer_token is None:
            raise StoreSettingsError("the store file no longer holds a token for this store")
        return {"token": now.bearer_token.get_secret_value(), "expires_at": datetime.now(UTC) + _ASK_AGAIN}

    return GCSStore(
        location.container,
        config=config,
        client_options=_client_options(settings),
        retry_config=_RETRY,
        credential_provider=_provider(GcsSettings, current, credential) if settings.bearer_token else None,
    )


def _azure(location: Location, settings: AzureSettings, current: Callable[[], StoreSettings]) -> AzureStore:
    config: AzureConfig = {}
    if account := location.account or settings.account_name:
        config["account_name"] = account
    if settings.endpoint_url:
        config["endpoint"] = settings.endpoint_url.removesuffix("/")
    if settings.anonymous:
        config["skip_signature"] = True
    if settings.client_secret:
        config["client_secret"] = settings.client_secret.get_secret_value()
    if settings.client_id:
        config["client_id"] = settings.client_id
    if settings.tenant_id:
        config["tenant_id"] = settings.tenant_id

    def credential(now: AzureSettings) -> AzureCredential:
        again = datetime.now(UTC) + _ASK_AGAIN
        if now.account_key:
            return {"access_key": now.account_key.get_secret_value(), "expires_at": again}
        if now.sas_token:
            return {"sas_token": now.sas_token.get_secret_value().removeprefix("?"), "expires_at": again}
        if now.bearer_token:
            return {"token": now.bearer_token.get_secret_value(), "expires_at": again}
        raise StoreSettingsError("the store file no longer holds a key or token for this store")

    by_secret = settings.account_key or settings.sas_token or settings.bearer_token
    return AzureStore(
        location.container,
        config=config,
        client_options=_client_options(settings),
        retry_config=_RETRY,
        credential_provider=_provider(AzureSettings, current, credential) if by_secret else None,
    )


_Credential = TypeVar("_Credential")


def _provider(
    kind: type[_Kind], current: Callable[[], StoreSettings], credential: Callable[[_Kind], _Credential]
) -> Callable[[], _Credential]:
    def ask() -> _Credential:
        settings = current()
        if not isinstance(settings, kind):
            raise StoreSettingsError(f"the store file's entry changed to kind {settings.kind!r}")
        return credential(settings)

    return ask


def _client_options(settings: S3Settings | GcsSettings | AzureSettings, default_ca: str = "") -> ClientConfig:
    options: ClientConfig = {
        "timeout": _NO_LIMIT,
        "connect_timeout": timedelta(seconds=settings.connect_timeout_seconds),
        "read_timeout": timedelta(seconds=settings.request_timeout_seconds),
        "allow_http": (settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"),
        "user_agent": "airflow-provider-vllm-batch",
    }
    pem = settings.ca_pem()
    if pem is None and (path := os.environ.get(default_ca)):
        pem = settings.model_copy(update={"ca_bundle": path}).ca_pem()
    if pem is not None:
        options["root_certificate"] = pem
    if not settings.verify:
        options["allow_invalid_certificates"] = True
    if settings.proxy_url:
        options["proxy_url"] = settings.proxy_url.get_secret_value()
    return options


def _ambient_region() -> str | None:
    """Return the region of the environment or of the shared configuration file."""
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        return region
    profile = os.environ.get("AWS_PROFILE", "default")
    section = "default" if profile == "default" else f"profile {profile}"
    return _shared_file("AWS_CONFIG_FILE", "config").get(section, "region", fallback=None)


def _shared_profile() -> S3Credential | None:
    """Return the keys of the shared credentials file, which the store library does not read.

    Null where the environment names keys or a role: these come first in every AWS client's chain.
    """
    first = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(os.environ.get(name) for name in first):
        return None
    file = _shared_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    profile = os.environ.get("AWS_PROFILE", "default")
    key = file.get(profile, "aws_access_key_id", fallback=None)
    secret = file.get(profile, "aws_secret_access_key", fallback=None)
    if not key or not secret:
        return None
    token = file.get(profile, "aws_session_token", fallback=None)
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


def _shared_file(variable: str, name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise StoreSettingsError(f"{path} can't be read ({type(error).__name__})") from None
    return parser
