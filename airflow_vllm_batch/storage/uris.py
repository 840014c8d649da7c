"""Split URIs literally: a key is what stands after ``scheme://bucket/``, whatever characters it holds.

Never a URL parser for object stores: ``#``, ``?``, ``%`` and ``+`` are ordinary characters of a key. A ``file://`` path
is taken literally too, without percent-decoding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.base import ObjectNameError

StoreKind = Literal["local", "s3", "gcs", "azure", "http"]

KINDS: dict[str, StoreKind] = {
    "file": "local",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "wasb": "azure",
    "wasbs": "azure",
    "http": "http",
    "https": "http",
}

LOCAL_PRIVATE_PREFIX = ".vllm-batch-"
"""Files of a local folder that start so are unfinished puts and locks: no objects, never listed."""


@dataclass(frozen=True)
class Location:
    """Where a URI points to.

    :param container: bucket or container; empty for local paths and http(s).
    :param key: the literal key, the local path, or the whole http(s) URL.
    :param account: of ``container@account.dfs.core.windows.net``; null where the settings name it.
    """

    kind: StoreKind
    container: str
    key: str
    account: str | None = None


def parse_uri(uri: str) -> Location:
    """Split a URI or a plain path; nothing is decoded, normalised or checked beyond the split.

    :raises ValueError: for an unknown scheme, a missing bucket or an empty path.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        if not uri or "\0" in uri:
            raise ValueError(f"a path can't be empty or hold a NUL character, got {uri!r}")
        return Location("local", "", uri)
    kind = KINDS.get(scheme.lower())
    if kind is None:
        raise ValueError(f"{uri!r}: unknown scheme {scheme!r}; known are {', '.join(KINDS)} and plain paths")
    if kind == "http":
        if not urlsplit(uri).hostname:
            raise ValueError(f"{without_query(uri)!r} names no host")
        return Location("http", "", uri)
    if kind == "local":
        if not rest.startswith("/"):
            raise ValueError(f"{uri!r}: a file URI needs an absolute path, as in file:///data/in.jsonl")
        return Location("local", "", rest)
    container, _, key = rest.partition("/")
    container, at, host = container.partition("@")
    if not container:
        raise ValueError(f"{uri!r} names no bucket: write {scheme}://bucket/key")
    account = host.partition(".")[0] if at and kind == "azure" else None
    if at and not account:
        raise ValueError(f"{uri!r}: '@' stands only in container@account URIs of Azure; credentials go into settings")
    return Location(kind, container, key, account)


def check_object_name(name: str, kind: StoreKind = "s3", *, uri: str | None = None) -> str:
    """Return the name; raises ``ObjectNameError`` where a store of this kind can't hold exactly this name.

    :param uri: what to call the object in the message, where it is more than the name.
    """
    shown = uri or name
    if reason := _unholdable(name, kind):
        raise ObjectNameError(f"{shown!r}: {reason}; rename the object, names are never altered")
    return name


def _unholdable(name: str, kind: StoreKind) -> str | None:
    if not name:
        return "an object needs a name"
    if name.startswith("/"):
        return "a key can't start with '/'"
    if name.endswith("/"):
        return "a trailing '/' names a folder, not an object"
    segments = name.split("/")
    if "" in segments:
        return "'//' can't be held exactly, the empty part would be lost"
    if "." in segments or ".." in segments:
        return "'.' and '..' are no names"
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in name):
        return "control characters can't be held exactly"
    if "\\" in name and kind != "local":
        return "a backslash is turned into '/' by some stores"
    if kind == "local":
        if any(segment.startswith(LOCAL_PRIVATE_PREFIX) for segment in segments):
            return f"names that start with {LOCAL_PRIVATE_PREFIX!r} are kept for unfinished puts"
        if any(len(os.fsencode(segment)) > 255 for segment in segments):
            return "a part of a file name has at most 255 bytes"
    elif len(name.encode()) > 1024:
        return "a key has at most 1,024 bytes"
    return None


def check_folder_key(key: str, kind: StoreKind, *, uri: str) -> str:
    """Return a folder's key without its one trailing slash, empty for a whole bucket.

    :raises ObjectNameError: where a part of it can't be held exactly.
    """
    trimmed = key.removesuffix("/")
    if not trimmed and not key:
        return ""
    return check_object_name(trimmed, kind, uri=uri)


def join_uri(folder: str, name: str) -> str:
    """Join with exactly one slash; an empty name is the folder itself, with its slash."""
    return f"{folder.removesuffix('/')}/{name}"


def not_found_hint(key: str) -> str:
    """Return what to look at when a key is not found: nobody guesses, and a decoded or encoded key is another one."""
    hints = []
    if "+" in key:
        hints.append("keys are literal: '+' is a plus; event notifications write a space as '+'")
    if "%" in key:
        hints.append("keys are literal: '%' starts no escape; an encoded key names another object")
    return "".join(f" ({hint})" for hint in hints)


def same_object(first: str, second: str) -> bool:
    """Whether two URIs name the same object: input = output is refused.

    Local paths are resolved (symlinks, ``..``, ``file://``), ``s3a`` is ``s3``, an http host has no case and its
    default port is no difference; the query of an http(s) URL is part of neither (it signs). Nothing is contacted.

    :raises ValueError: where one of them can't be split.
    """
    return _identity(first) == _identity(second)


def _identity(uri: str) -> tuple[str, str, str, str]:
    location = parse_uri(uri)
    match location.kind:
        case "local":
            return ("local", "", "", os.path.realpath(location.key))
        case "http":
            parts = urlsplit(location.key)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            return ("http", f"{parts.hostname}", str(port), parts.path or "/")
        case _:
            return (location.kind, location.account or "", location.container, location.key.removesuffix("/"))
