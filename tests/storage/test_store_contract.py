"""What every Store promises, run against memory, a local folder and a real S3 server."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import (
    Conditions,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNameError,
    Store,
)
from airflow_vllm_batch.storage.memory import MemoryStore
from airflow_vllm_batch.storage.settings import S3Settings, StoreFile
from tests.support.seaweed import SeaweedServer

ODD_NAMES = [
    "a b",
    "a#b",
    "a#1",
    "a%20b",
    "a%b",
    "a+b",
    "a?b=c&d",
    "é日本",
    "a'b\"c",
    "[a]{b}*~=:;,@!$",
    "folder/a b#1.jsonl",
]


def s3_store(server: SeaweedServer, prefix: str = "") -> Store:
    settings = S3Settings(
        access_key_id=server.access_key_id,
        secret_access_key=server.secret_access_key,
        endpoint_url=server.endpoint_url,
        region=server.region,
    )
    access = Access.from_document(StoreFile(stores={"output": settings}))
    return access.open_folder(f"s3://tests/{prefix or uuid.uuid4().hex}/run 1/", "output")


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    match request.param:
        case "memory":
            yield MemoryStore()
        case "local":
            yield Access.ambient().open_folder(f"{tmp_path}/new folder/run 1/", "output")
        case _:
            yield s3_store(request.getfixturevalue("s3_server"))


async def names(store: Store, prefix: str = "") -> list[str]:
    return [info.name async for info in store.list(prefix)]


async def read(store: Store, name: str, etag: str | None = None) -> bytes:
    return b"".join([chunk async for chunk in store.stream(name, etag=etag)])


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_a_name_comes_back_as_it_was_put(store: Store, name: str) -> None:
    await store.put(name, b"1")
    assert await names(store) == [name]
    assert await store.get(name) == b"1"
    assert await read(store, name) == b"1"
    assert (await store.head(name)).name == name
    assert store.uri(name) == store.uri() + name


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", "./a", "a/..", "a\nb", "a\x7f"])
async def test_a_name_that_cannot_be_held_is_refused_by_every_method(store: Store, name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1")
    calls: list[Callable[[], object]] = [
        lambda: store.head(name),
        lambda: store.get(name),
        lambda: store.get_with_info(name),
        lambda: store.put(name, b""),
        lambda: store.put_new(name, b""),
        lambda: store.put_if_match(name, b"", '"e"'),
        lambda: store.put_file(name, file),
        lambda: store.delete(name),
        lambda: read(store, name),
    ]
    for call in calls:
        with pytest.raises(ObjectNameError):
            await call()  # type: ignore[misc]
    assert await names(store) == []


async def test_an_absent_object_is_file_not_found(store: Store) -> None:
    for call in (store.head("x"), store.get("x"), store.get_with_info("x"), read(store, "x")):
        with pytest.raises(FileNotFoundError):
            await call
    await store.delete("x")
    assert await names(store) == []


async def test_the_etag_of_a_put_is_that_of_head_get_list_and_stream(store: Store) -> None:
    put = await store.put("a", b"one")
    data, info = await store.get_with_info("a")
    assert data == b"one"
    assert put.etag is not None
    assert put.etag == info.etag == (await store.head("a")).etag
    assert [found.etag async for found in store.list()] == [put.etag]
    assert (put.size, info.size, (await store.head("a")).size) == (3, 3, 3)
    assert await read(store, "a", put.etag) == b"one"


async def test_another_put_of_the_same_size_has_another_etag(store: Store) -> None:
    first = await store.put("a", b"one")
    second = await store.put("a", b"two")
    assert first.etag != second.etag
    with pytest.raises(ObjectChangedError, match="replaced"):
        await read(store, "a", first.etag)
    assert await read(store, "a", second.etag) == b"two"


async def test_put_new_creates_once(store: Store) -> None:
    created = await store.put_new("a", b"one")
    with pytest.raises(ObjectExistsError):
        await store.put_new("a", b"two")
    assert await store.get("a") == b"one"
    assert (await store.head("a")).etag == created.etag


async def test_put_new_of_bytes_that_are_there_is_ours(store: Store) -> None:
    first = await store.put_new("a", b"one")
    assert (await store.put_new("a", b"one")).etag == first.etag


async def test_put_if_match_replaces_only_what_was_seen(store: Store) -> None:
    first = await store.put("a", b"one")
    assert first.etag is not None
    second = await store.put_if_match("a", b"two", first.etag)
    with pytest.raises(ObjectChangedError):
        await store.put_if_match("a", b"three", first.etag)
    assert await store.get("a") == b"two"
    assert second.etag is not None
    await store.put_if_match("a", b"four", second.etag)
    assert await store.get("a") == b"four"


async def test_put_if_match_never_creates(store: Store) -> None:
    with pytest.raises(ObjectChangedError):
        await store.put_if_match("a", b"one", '"0123456789abcdef0123456789abcdef"')
    assert await names(store) == []


async def test_a_file_is_put_whole_and_may_replace(store: Store, tmp_path: Path) -> None:
    block = bytes(range(256)) * 4096
    file = tmp_path / "big"
    file.write_bytes(block * 20 + b"end")  # 20 MiB: three parts of a multipart upload
    await store.put("big", b"old")
    info = await store.put_file("big", file)
    assert info.size == 20 * 1024 * 1024 + 3
    assert info.etag == (await store.head("big")).etag
    assert hashlib.sha256(await read(store, "big", info.etag)).digest() == hashlib.sha256(file.read_bytes()).digest()


async def test_an_empty_file_is_an_empty_object(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert (await store.put_file("errors.jsonl", tmp_path / "empty")).size == 0
    assert await store.get("errors.jsonl") == b""
    assert await read(store, "errors.jsonl") == b""


async def test_a_list_is_ordered_by_name_and_bound_to_its_folder(store: Store) -> None:
    for name in ["b", "a/2", "a/10", "a#1", "ab/1", "a/x/y"]:
        await store.put(name, b"1")
    assert await names(store) == ["a#1", "a/10", "a/2", "a/x/y", "ab/1", "b"]
    assert await names(store, "a/") == ["a/10", "a/2", "a/x/y"]
    assert await names(store, "a/x/") == ["a/x/y"]
    assert await names(store, "none/") == []


async def test_a_deleted_object_is_gone(store: Store) -> None:
    await store.put("a/b", b"1")
    await store.delete("a/b")
    assert await names(store) == []


async def test_the_probe_finds_both_conditions_and_leaves_nothing(store: Store) -> None:
    assert await store.probe() == Conditions(create_only=True, if_match=True)
    assert await names(store) == []


async def test_a_stream_left_early_harms_nothing(store: Store) -> None:
    await store.put("a", bytes(3 * 1024 * 1024))
    async with contextlib.aclosing(store.stream("a")) as chunks:  # type: ignore[type-var]
        assert len(await anext(chunks)) >= 1
    assert len(await store.get("a")) == 3 * 1024 * 1024
