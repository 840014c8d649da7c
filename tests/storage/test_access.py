from __future__ import annotations

import asyncio
import logging
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectNameError, StorageError
from airflow_vllm_batch.storage.settings import (
    AzureSettings,
    GcsSettings,
    HttpSettings,
    S3Settings,
    ServerSettings,
    StoreFile,
    StoreSettingsError,
    write_store_file,
)
from tests.support.seaweed import SeaweedServer

SIGNED = "https://h/b/in.jsonl?X-Amz-Credential=AK&X-Amz-Signature=0123456789abcdef01"
SECRETS = {"s3cr3t-key", "s3ss1on", "http://u:pr0xy-pw@proxy:3128", "h3ader", "passw0rd", "api-k3y", SIGNED}


def document() -> StoreFile:
    return StoreFile(
        stores={
            "input": S3Settings(
                access_key_id="AK",
                secret_access_key="s3cr3t-key",
                session_token="s3ss1on",
                expires_at=datetime(2030, 1, 1, tzinfo=UTC),
                proxy_url="http://u:pr0xy-pw@proxy:3128",
            ),
            "web": HttpSettings(headers={"X-Key": "h3ader"}, login="me", password="passw0rd"),
            "role": S3Settings(ambient=True, region="eu-west-1"),
        },
        urls={"https://h/b/in.jsonl": SIGNED},
        server=ServerSettings(api_key="api-k3y"),
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_written_file_reads_back_whole_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    write_store_file(path, document())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert StoreFile.read(path.read_bytes(), "store.json") == document()
    assert [each.name for each in tmp_path.iterdir()] == ["store.json"]


def test_a_replaced_file_is_a_new_inode(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    write_store_file(path, document())
    with path.open("rb") as old:
        write_store_file(path, StoreFile())
        assert StoreFile.read(old.read(), "store.json") == document()
    assert StoreFile.read(path.read_bytes(), "store.json") == StoreFile()


def test_no_secret_is_shown_but_on_demand() -> None:
    shown = [repr(document()), str(document()), document().model_dump_json(), document().to_bytes().decode()]
    shown.append(repr(document().model_dump()))
    for text in shown:
        assert not [secret for secret in SECRETS if secret in text]
    assert all(secret in document().to_secret_bytes().decode() for secret in SECRETS)


def test_every_secret_is_listed_for_redaction_longest_first() -> None:
    found = document().secrets()
    assert set(found) >= SECRETS
    assert "X-Amz-Credential=AK&X-Amz-Signature=0123456789abcdef01" in found
    assert {"0123456789abcdef01", "pr0xy-pw"} <= set(found)
    assert found == sorted(found, key=lambda each: (-len(each), each))
    assert "AK" not in found


def test_ambient_access_stores_no_secret() -> None:
    assert StoreFile(stores={"input": S3Settings(ambient=True)}).secrets() == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"access_key_id": "AK"},
        {"access_key_id": "AK", "secret_access_key": "s3cr3t-key", "ambient": True},
        {"ambient": True, "anonymous": True},
        {"ambient": True, "sse_kms_key_id": "k"},
        {"ambient": True, "secret_acces_key": "s3cr3t-key"},
    ],
)
def test_settings_that_do_not_fit_are_refused_without_a_secret(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError) as caught:
        StoreFile.model_validate({"stores": {"input": {"kind": "s3", **fields}}})
    assert "s3cr3t-key" not in str(caught.value)


def test_a_file_with_a_fault_is_refused_without_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    for text in (
        '{"contract_version":"1.0","stores":{"a":{"kind":"s3","secret_access_key":"s3cr3t-key"}}}',
        "s3cr3t-key",
    ):
        path.write_text(text)
        with pytest.raises(StoreSettingsError, match=r"store file .*store\.json") as caught:
            Access.from_file(path)
        assert "s3cr3t-key" not in str(caught.value)
        assert caught.value.__cause__ is None
    with pytest.raises(StoreSettingsError, match="No such file"):
        Access.from_file(tmp_path / "none.json")


def test_a_missing_store_is_named_with_those_that_are_there() -> None:
    access = Access.from_document(document())
    with pytest.raises(StoreSettingsError, match=r"no store 'output' \(it has 'input', 'web', 'role'\): .*kind 's3'"):
        access.open_folder("s3://b/run/", "output")
    with pytest.raises(StoreSettingsError, match="store 'web' is of kind 'http', its URI is of kind 's3'"):
        access.open_source("s3://b/k", "web")


def test_local_paths_and_urls_need_no_entry(tmp_path: Path) -> None:
    access = Access.from_document(StoreFile())
    assert access.open_folder(str(tmp_path), "output").uri("a") == f"{tmp_path}/a"
    assert access.open_folder("file:///data/run/", "output").uri() == "file:///data/run/"
    assert access.open_source("https://h/b/in.jsonl?X-Amz-Signature=1", "input").uri == "https://h/b/in.jsonl"


def test_every_kind_opens_without_contact() -> None:
    access = Access.from_document(
        StoreFile(
            stores={
                "gcs": GcsSettings(bearer_token="token"),
                "azure": AzureSettings(account_key="a2V5", account_name="acc"),
                "sas": AzureSettings(sas_token="sv=1&sig=x"),
            }
        )
    )
    assert access.open_folder("gs://b/run", "gcs").uri("a#b") == "gs://b/run/a#b"
    assert access.open_folder("az://c/run", "azure").uri() == "az://c/run/"
    assert access.open_target("abfss://c@acc.dfs.core.windows.net/o.jsonl", "sas").uri.endswith("/o.jsonl")


def test_what_is_no_folder_or_no_object_is_refused() -> None:
    access = Access.ambient()
    with pytest.raises(ValueError, match="can't be a folder"):
        access.open_folder("https://h/out/", "output")
    for uri in ("s3://b/a/", "s3://b", "s3://b/a//b", "/data/"):
        with pytest.raises(ObjectNameError):
            access.open_source(uri, "input")
    with pytest.raises(ObjectNameError):
        access.open_folder("s3://b/a//b/", "output")


async def test_a_relative_path_is_read_and_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in #1.jsonl").write_bytes(b"rows")
    source = Access.ambient().open_source("in #1.jsonl", "input")
    info = await source.info()
    assert (source.uri, info.size) == ("in #1.jsonl", 4)
    assert b"".join([chunk async for chunk in source.stream(etag=info.etag)]) == b"rows"
    written = await Access.ambient().open_target("out/o.jsonl", "output").put_file(Path("in #1.jsonl"))
    assert (Path("out/o.jsonl").read_bytes(), written.status) == (b"rows", None)


def test_a_url_is_completed_and_the_server_known() -> None:
    access = Access.from_document(document())
    assert access.full_url("https://h/b/in.jsonl") == SIGNED
    assert access.full_url("https://h/other") == "https://h/other"
    assert access.server == ServerSettings(api_key="api-k3y")
    assert Access.ambient().server == ServerSettings()


def test_a_changed_file_is_read_again_at_most_once_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "store.json", Clock()
    write_store_file(path, StoreFile(urls={"https://h/a": "https://h/a?1"}))
    access = Access.from_file(path, clock=clock)
    write_store_file(path, StoreFile(urls={"https://h/a": "https://h/a?2"}))
    clock.now = 0.9
    assert access.full_url("https://h/a") == "https://h/a?1"
    clock.now = 1.0
    assert access.full_url("https://h/a") == "https://h/a?2"


def test_a_half_written_file_leaves_the_last_good_one_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "store.json", Clock()
    write_store_file(path, document())
    access = Access.from_file(path, clock=clock)
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 2.0, 3.0):
            path.write_bytes(whole[: len(whole) // 2])
            clock.now = now
            assert access.full_url("https://h/b/in.jsonl") == SIGNED
        path.unlink()
        for now in (4.0, 5.0):
            clock.now = now
            assert access.server.api_key is not None
    assert not [secret for secret in SECRETS if secret in caplog.text]
    write_store_file(path, StoreFile())
    clock.now = 6.0
    assert access.secrets() == []


def test_a_fault_of_the_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "store.json", Clock()
    write_store_file(path, document())
    access = Access.from_file(path, clock=clock)
    path.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 2.0, 3.0):
            clock.now = now
            access.secrets()
    assert len(caplog.records) == 1
    assert "last good credentials stay in use" in caplog.text


@pytest.mark.s3
async def test_renewed_keys_are_used_by_a_store_that_is_open_already(tmp_path: Path, s3_server: SeaweedServer) -> None:
    path, clock = tmp_path / "store.json", Clock()

    def settings(secret: str) -> StoreFile:
        s3 = S3Settings(
            access_key_id=s3_server.access_key_id,
            secret_access_key=secret,
            endpoint_url=s3_server.endpoint_url,
            region=s3_server.region,
        )
        return StoreFile(stores={"output": s3})

    write_store_file(path, settings("wrong-secret-value"))
    folder = Access.from_file(path, clock=clock).open_folder("s3://tests/renewed/", "output")
    with pytest.raises(StorageError, match=r"permission denied .*SignatureDoesNotMatch.* may have expired") as caught:
        await folder.put("a", b"1")
    assert "wrong-secret-value" not in f"{caught.value}{caught.value.__cause__}"
    write_store_file(path, settings(s3_server.secret_access_key))
    clock.now = 1.0
    async with asyncio.timeout(20):
        while True:  # the store library keeps a credential for a tenth of a second
            try:
                await folder.put("a", b"1")
                break
            except StorageError:
                continue
    assert await folder.get("a") == b"1"
