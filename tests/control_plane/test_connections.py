"""An Airflow connection to store settings, by environment variables as Airflow reads them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support import task  # noqa: F401  # isort: skip  before Airflow

from airflow_vllm_batch.connections import BY_SCHEME, Connected, connect, expires_at
from airflow_vllm_batch.exceptions import ConnectionUnusableError, ProviderMissingError, VLLMBatchFailedError
from airflow_vllm_batch.storage.settings import HttpSettings, LocalSettings, S3Settings

AWS = {"conn_type": "aws", "login": "AKTEST", "password": "secret-key-1", "extra": {"region_name": "eu-west-1"}}
WEB = {"conn_type": "http", "host": "https://files.example/base/"}


class Connections:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def add(self, conn_id: str, *layers: dict[str, Any], **extra: Any) -> None:
        merged = {key: value for layer in layers for key, value in layer.items()}
        if extra:
            merged["extra"] = {**merged.get("extra", {}), **extra}
        self._patch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(merged))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    # No network: the last link of the ambient chain asks a link-local address.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    return Connections(monkeypatch)


def s3(connected: Connected) -> S3Settings:
    settings = connected.settings()
    assert isinstance(settings, S3Settings)
    return settings


def http(connected: Connected) -> HttpSettings:
    settings = connected.settings()
    assert isinstance(settings, HttpSettings)
    return settings


def refusal(uri: str, conn_id: str | None) -> str:
    with pytest.raises(ConnectionUnusableError) as caught:
        connect(uri, conn_id).settings()
    assert caught.value.exit_code == 69
    return str(caught.value)


# Which connection


def test_a_connection_that_is_not_there_is_named_with_what_to_do(connections: Connections) -> None:
    said = refusal("s3://b/k", "aws_nowhere")
    assert said.startswith("connection 'aws_nowhere' can't be read (The conn_id `aws_nowhere` isn't defined)")
    assert "create it in Airflow" in said


def test_by_scheme_the_default_connection_is_taken_where_it_exists(connections: Connections) -> None:
    connections.add("aws_default", AWS)
    assert s3(connect("s3://b/k", BY_SCHEME)).access_key_id == "AKTEST"


def test_by_scheme_ambient_credentials_are_taken_where_airflow_has_no_default(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AMBIENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ambient-secret")
    assert s3(connect("s3://b/k", BY_SCHEME)).access_key_id == "AMBIENT"


def test_none_is_ambient_even_where_a_default_connection_exists(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections.add("aws_default", AWS)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AMBIENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ambient-secret")
    assert s3(connect("s3://b/k", None)).access_key_id == "AMBIENT"


def test_no_credentials_anywhere_is_told_with_what_to_do(connections: Connections) -> None:
    connections.add("aws_x", {"conn_type": "aws"})
    said = refusal("s3://b/k", "aws_x")
    assert "connection 'aws_x' holds no AWS keys" in said
    assert "role_arn" in said


@pytest.mark.parametrize(
    ("uri", "conn_id", "phrase"),
    [
        ("/data/in.jsonl", "aws_x", "is of type 'aws', but '/data/in.jsonl' is a local path"),
        ("s3://b/k", "web", "is of type 'http' and can't open s3:// URIs"),
        ("https://h/x", "aws_x", "is of type 'aws', but https:// needs one of type 'http'"),
        ("s3://b/k", "pg", "is of type 'postgres', but s3:// needs one of type 'aws'"),
    ],
)
def test_a_connection_of_another_type_is_refused(connections: Connections, uri: str, conn_id: str, phrase: str) -> None:
    connections.add("aws_x", AWS)
    connections.add("web", WEB)
    connections.add("pg", {"conn_type": "postgres", "host": "h"})
    assert phrase in refusal(uri, conn_id)


def test_a_local_path_needs_no_connection(connections: Connections) -> None:
    assert connect("/data/in.jsonl", BY_SCHEME) == Connected("/data/in.jsonl", LocalSettings)


@pytest.mark.parametrize(("uri", "package"), [("gs://b/k", "google"), ("abfs://c/k", "microsoft-azure")])
def test_a_missing_provider_is_told_with_the_line_that_installs_it(
    connections: Connections, uri: str, package: str
) -> None:
    with pytest.raises(ProviderMissingError, match=f"pip install apache-airflow-providers-{package}") as caught:
        connect(uri, None).settings()
    assert isinstance(caught.value, VLLMBatchFailedError)


def test_a_missing_amazon_provider_is_told_with_our_extra(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProviderMissingError, match=r"pip install 'airflow-provider-vllm-batch\[amazon\]'"):
        connect("s3://b/k", None)


# S3


def test_keys_region_endpoint_and_encryption_come_from_the_connection(connections: Connections) -> None:
    connections.add(
        "aws_x",
        AWS,
        aws_session_token="token-1",
        service_config={"s3": {"endpoint_url": "http://s3.internal:9000"}},
        endpoint_url="http://all.internal",
        verify=False,
        config_kwargs={"s3": {"addressing_style": "virtual"}, "proxies": {"http": "http://proxy:3128"}},
        extra_args={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"},
    )
    settings = s3(connect("s3://b/k ey#1?%20", "aws_x"))
    assert settings.model_dump(exclude={"secret_access_key", "session_token", "proxy_url"}) == S3Settings(
        access_key_id="AKTEST",
        secret_access_key="x",
        region="eu-west-1",
        endpoint_url="http://s3.internal:9000",
        addressing_style="virtual",
        verify=False,
        sse="aws:kms",
        sse_kms_key_id="key-1",
    ).model_dump(exclude={"secret_access_key", "session_token", "proxy_url"})
    assert settings.secret_access_key is not None
    assert settings.secret_access_key.get_secret_value() == "secret-key-1"
    assert settings.session_token is not None
    assert settings.session_token.get_secret_value() == "token-1"
    assert settings.proxy_url is not None
    assert settings.proxy_url.get_secret_value() == "http://proxy:3128"


def test_a_key_is_taken_as_it_is_written(connections: Connections) -> None:
    connections.add("aws_x", AWS)
    assert connect("s3://b/k ey#1?%20+é", "aws_x").uri == "s3://b/k ey#1?%20+é"


@pytest.mark.parametrize(
    ("verify", "expected"),
    [(None, (None, True)), (True, (None, True)), ("false", (None, False)), ("/ca.pem", ("/ca.pem", True))],
)
def test_verify_is_a_switch_or_a_bundle(
    connections: Connections, verify: object, expected: tuple[str | None, bool]
) -> None:
    connections.add("aws_x", AWS, **({} if verify is None else {"verify": verify}))
    settings = s3(connect("s3://b/k", "aws_x"))
    assert (settings.ca_bundle, settings.verify) == expected


def test_an_unsigned_connection_is_anonymous(connections: Connections) -> None:
    connections.add("aws_x", {"conn_type": "aws"}, config_kwargs={"signature_version": "unsigned"})
    settings = s3(connect("s3://b/k", "aws_x"))
    assert settings.anonymous
    assert settings.access_key_id is None


def test_credentials_that_end_are_asked_for_again(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook
    from botocore.credentials import RefreshableCredentials

    asked = 0

    def refresh() -> dict[str, str]:
        nonlocal asked
        asked += 1
        ends = datetime.now(UTC) + timedelta(minutes=5)  # so soon that each look asks again
        return {"access_key": f"AK{asked}", "secret_key": "s", "token": "t", "expiry_time": ends.isoformat()}

    credentials = RefreshableCredentials.create_from_metadata(refresh(), refresh, "test")

    class Session:
        region_name = "eu-west-1"

        def get_credentials(self) -> RefreshableCredentials:
            return credentials

    monkeypatch.setattr(AwsGenericHook, "get_session", lambda self, region_name=None: Session())
    connections.add("aws_x", AWS)
    connected = connect("s3://b/k", "aws_x")
    first, second = s3(connected), s3(connected)
    assert first.access_key_id != second.access_key_id
    ends = expires_at(second)
    assert ends is not None
    assert timedelta(minutes=4) < ends - datetime.now(UTC) < timedelta(minutes=6)


# HTTP


@pytest.mark.parametrize(
    ("host", "path", "url"),
    [
        ("https://h/base", "a/in.jsonl", "https://h/base/a/in.jsonl"),
        ("https://h/base/", "/a/in.jsonl", "https://h/base/a/in.jsonl"),
        ("https://h", "in.jsonl?x=%2F", "https://h/in.jsonl?x=%2F"),
        ("https://h/", "/a//b", "https://h/a//b"),
    ],
)
def test_a_path_is_joined_to_its_connection_with_one_slash(
    connections: Connections, host: str, path: str, url: str
) -> None:
    connections.add("web", WEB, {"host": host})
    assert connect(path, "web").uri == url


def test_a_host_without_a_scheme_takes_the_connections(connections: Connections) -> None:
    connections.add("web", {"conn_type": "http", "host": "h", "schema": "https", "port": 8443})
    assert connect("in.jsonl", "web").uri == "https://h:8443/in.jsonl"


def test_a_connection_without_a_host_is_refused(connections: Connections) -> None:
    connections.add("web", {"conn_type": "http"})
    assert "names no host" in refusal("in.jsonl", "web")


def test_login_and_known_headers_are_sent_and_options_are_not(connections: Connections) -> None:
    connections.add(
        "web",
        WEB,
        {"login": "u", "password": "password-1"},
        **{"X-Api-Key": "key-1", "Authorization": "Bearer t", "timeout": 7, "stream": True, "headers": {"A": "b"}},
        unheard_of="v",
        verify_ssl="/ca.pem",
    )
    settings = http(connect("in.jsonl", "web"))
    assert {name: value.get_secret_value() for name, value in settings.headers.items()} == {
        "A": "b",
        "X-Api-Key": "key-1",
        "Authorization": "Bearer t",
    }
    assert settings.login == "u"
    assert settings.request_timeout_seconds == 7
    assert settings.ca_bundle == "/ca.pem"


def test_a_login_and_a_token_together_are_refused_without_showing_them(connections: Connections) -> None:
    connections.add("web", WEB, {"login": "u", "password": "password-1"}, token="token-1")
    said = refusal("in.jsonl", "web")
    assert "connection 'web' does not fit: Value error, give login and password, or token, not both" in said


def test_a_client_certificate_is_refused_and_not_ignored(connections: Connections) -> None:
    connections.add("web", WEB, cert="/c.pem")
    assert "sets 'cert'" in refusal("in.jsonl", "web")


def test_credentials_are_not_sent_to_another_host(connections: Connections) -> None:
    connections.add("web", WEB, {"login": "u", "password": "password-1"})
    assert "are not sent to another host" in refusal("https://elsewhere.example/x?sig=1", "web")
    assert http(connect("https://files.example/x", "web")).login == "u"


def test_the_default_http_connection_of_another_host_is_left_alone(connections: Connections) -> None:
    connections.add("http_default", WEB, {"login": "u", "password": "password-1"})
    assert http(connect("https://elsewhere.example/x", BY_SCHEME)).login is None


def test_what_can_not_be_parsed_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BROKEN", "aws://user:hunter22@[host")
    said = refusal("s3://b/k", "broken")
    assert "hunter22" not in said
    assert "connection 'broken' can't be read" in said
