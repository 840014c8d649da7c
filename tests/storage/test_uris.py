from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.storage.base import ObjectNameError
from airflow_vllm_batch.storage.uris import (
    Location,
    check_folder_key,
    check_object_name,
    join_uri,
    not_found_hint,
    parse_uri,
    same_object,
)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://b/a b/c#d/e?f%20g+h", Location("s3", "b", "a b/c#d/e?f%20g+h")),
        ("s3a://b/k", Location("s3", "b", "k")),
        ("s3://b", Location("s3", "b", "")),
        ("s3://b//k", Location("s3", "b", "/k")),
        ("s3://b/s3://c/d", Location("s3", "b", "s3://c/d")),
        ("gs://b/é日本", Location("gcs", "b", "é日本")),
        ("az://c/k", Location("azure", "c", "k")),
        ("abfss://c@acc.dfs.core.windows.net/p/k", Location("azure", "c", "p/k", "acc")),
        ("wasbs://c@acc.blob.core.windows.net/k", Location("azure", "c", "k", "acc")),
        ("/data/in.jsonl", Location("local", "", "/data/in.jsonl")),
        ("in put#1.jsonl", Location("local", "", "in put#1.jsonl")),
        ("file:///data/a%20b", Location("local", "", "/data/a%20b")),
        ("https://h/b/a%20b?x=%zz", Location("http", "", "https://h/b/a%20b?x=%zz")),
    ],
)
def test_a_uri_is_split_literally(uri: str, expected: Location) -> None:
    assert parse_uri(uri) == expected


@pytest.mark.parametrize(
    "uri", ["", "s3://", "s3:///k", "ftp://h/x", "https://", "file://host/x", "s3://key:secret@b/k"]
)
def test_a_uri_that_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        parse_uri(uri)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_key_comes_out_of_a_uri_as_it_went_in(key: str) -> None:
    assert parse_uri(f"s3://bucket/{key}").key == key


@given(st.text(alphabet=st.sampled_from("ab./\\#?%+ é"), max_size=8))
def test_a_name_is_accepted_exactly_when_no_store_would_change_it(name: str) -> None:
    segments = name.split("/")
    good = "" not in segments and not {".", ".."} & set(segments) and "\\" not in name
    if good:
        assert check_object_name(name) == name
    else:
        with pytest.raises(ObjectNameError):
            check_object_name(name)


def test_a_refused_name_comes_with_the_reason() -> None:
    with pytest.raises(ObjectNameError, match=r"^'s3://b/a//b': '//' can't be held exactly"):
        check_object_name("a//b", uri="s3://b/a//b")
    with pytest.raises(ObjectNameError, match="a backslash is turned into '/'"):
        check_object_name("a\\b", "s3")
    with pytest.raises(ObjectNameError, match="at most 1,024 bytes"):
        check_object_name("é" * 513, "s3")


def test_a_local_name_may_hold_a_backslash_but_not_a_name_of_ours() -> None:
    assert check_object_name("a\\b", "local") == "a\\b"
    with pytest.raises(ObjectNameError, match="unfinished puts"):
        check_object_name("a/.vllm-batch-lock", "local")
    with pytest.raises(ObjectNameError, match="255 bytes"):
        check_object_name("a" * 256, "local")


def test_a_folder_loses_its_one_slash_and_nothing_else() -> None:
    assert check_folder_key("", "s3", uri="s3://b") == ""
    assert check_folder_key("a b/c/", "s3", uri="s3://b/a b/c/") == "a b/c"
    for key in ("/", "a//", "/a", "a/../b"):
        with pytest.raises(ObjectNameError):
            check_folder_key(key, "s3", uri=f"s3://b/{key}")


def test_joining_gives_exactly_one_slash() -> None:
    assert join_uri("s3://b/run", "a") == join_uri("s3://b/run/", "a") == "s3://b/run/a"


def test_a_missing_key_with_plus_or_percent_gets_a_hint() -> None:
    assert "a space as '+'" in not_found_hint("a+b")
    assert "starts no escape" in not_found_hint("a%20b")
    assert not_found_hint("a b") == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://b/k", "s3a://b/k"),
        ("s3://b/run", "s3://b/run/"),
        ("https://Host/x", "https://host:443/x?X-Amz-Signature=1"),
        ("http://h:80/x", "http://h/x"),
        ("abfss://c@acc.dfs.core.windows.net/k", "wasbs://c@acc.blob.core.windows.net/k"),
        ("/data/../data/in", "file:///data/in"),
    ],
)
def test_two_spellings_of_one_object_are_the_same(first: str, second: str) -> None:
    assert same_object(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://b/k", "s3://B/k"),
        ("s3://b/a%20b", "s3://b/a b"),
        ("s3://b/k", "gs://b/k"),
        ("https://h/a", "https://h/A"),
    ],
)
def test_two_objects_are_not_the_same(first: str, second: str) -> None:
    assert not same_object(first, second)


def test_a_link_and_its_target_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to("real")
    assert same_object(str(tmp_path / "link"), f"file://{tmp_path}/real")
    relative = os.path.relpath(tmp_path / "real")
    assert same_object(relative, str(tmp_path / "link"))
