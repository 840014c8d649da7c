"""Open stores, sources and targets by URI and store name, with the credentials of now.

The store file is read again when it changes, so that renewed credentials are used in mid-run. Nothing here is logged
but the file's path.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.base import Source, Store, Target
from airflow_vllm_batch.storage.clients import build_client
from airflow_vllm_batch.storage.http import HttpSource, HttpTarget
from airflow_vllm_batch.storage.local import LocalStore
from airflow_vllm_batch.storage.object_store import ObjectStore
from airflow_vllm_batch.storage.settings import (
    AzureSettings,
    GcsSettings,
    HttpSettings,
    LocalSettings,
    S3Settings,
    ServerSettings,
    StoreFile,
    StoreSettings,
    StoreSettingsError,
)
from airflow_vllm_batch.storage.single import StoreSource, StoreTarget
from airflow_vllm_batch.storage.uris import (
    Location,
    StoreKind,
    check_folder_key,
    check_object_name,
    parse_uri,
)

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0

_AMBIENT: dict[StoreKind, StoreSettings] = {
    "local": LocalSettings(),
    "s3": S3Settings(ambient=True),
    "gcs": GcsSettings(ambient=True),
    "azure": AzureSettings(ambient=True),
    "http": HttpSettings(),
}


class Access:
    """Resolves store names to settings. Made by one of the class methods.

    Local paths need no entry, http(s) URLs neither; every other URI needs one of its kind, but for :meth:`ambient`.
    """

    def __init__(self, current: Callable[[], StoreFile], *, ambient: bool = False) -> None:
        self._current = current
        self._ambient = ambient

    @classmethod
    def from_file(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Read the store file, and read it again whenever it changes.

        :param clock: seconds; the file is looked at no more than once a second of it.
        :raises StoreSettingsError: where it can't be read now. Later the last good one stays in use.
        """
        return cls(_WatchedFile(path, clock).current)

    @classmethod
    def from_document(cls, document: StoreFile) -> Self:
        return cls(lambda: document)

    @classmethod
    def ambient(cls) -> Self:
        """Open everything by what the environment of this process offers, whatever the store's name."""
        document = StoreFile()
        return cls(lambda: document, ambient=True)

    @property
    def server(self) -> ServerSettings:
        """How the server engine identifies itself; empty where the file does not say."""
        return self._current().server or ServerSettings()

    def secrets(self) -> list[str]:
        """Return every secret value in use now, longest first, for the redaction of logs."""
        return self._current().secrets()

    def full_url(self, uri: str) -> str:
        """Return the full signed URL of an http(s) URL without query; the URI itself where none is known."""
        found = self._current().urls.get(uri)
        return uri if found is None else found.get_secret_value()

    def opens(self, uri: str, store_name: str) -> bool:
        """Whether there is an entry of that name for a URI of this kind; nothing is contacted."""
        try:
            self._settings(parse_uri(uri).kind, store_name)
        except StoreSettingsError:
            return False
        return True

    def open_folder(self, uri: str, store_name: str) -> Store:
        """Open a folder; nothing is contacted.

        :raises ObjectNameError: where a part of the path can't be held exactly.
        :raises StoreSettingsError: where there is no fitting entry of that name.
        :raises ValueError: where the URI can't be split, or names an http(s) URL, below which nothing can be listed.
        """
        location = parse_uri(uri)
        self._settings(location.kind, store_name)
        match location.kind:
            case "http":
                raise ValueError(
                    f"{without_query(uri)!r} can't be a folder: only single objects are read or put by http(s)"
                )
            case "local":
                return LocalStore(Path(location.key), uri=uri if uri.endswith("/") else f"{uri}/")
            case _:
                return self._object_store(
                    location, check_folder_key(location.key, location.kind, uri=uri), uri, store_name
                )

    def open_source(self, uri: str, store_name: str) -> Source:
        """Open one object for reading; nothing is contacted. Raises as :meth:`open_folder`."""
        location = parse_uri(uri)
        settings = self._settings(location.kind, store_name)
        if isinstance(settings, HttpSettings):
            return HttpSource(without_query(uri), self._url(uri), self._http(store_name))
        return StoreSource(*self._object(location, uri, store_name))

    def open_target(self, uri: str, store_name: str) -> Target:
        """Open one object for writing; nothing is contacted. Raises as :meth:`open_folder`."""
        location = parse_uri(uri)
        settings = self._settings(location.kind, store_name)
        if isinstance(settings, HttpSettings):
            return HttpTarget(without_query(uri), self._url(uri), self._http(store_name))
        return StoreTarget(*self._object(location, uri, store_name))

    def _object(self, location: Location, uri: str, store_name: str) -> tuple[Store, str]:
        folder, slash, name = location.key.rpartition("/")
        if location.kind == "local":
            check_object_name(name, "local", uri=uri)
            parent = f"{folder}{slash}"
            return LocalStore(Path(parent or "."), uri=uri.removesuffix(name)), name
        check_object_name(location.key, location.kind, uri=uri)
        return self._object_store(location, folder, uri.removesuffix(name), store_name), name

    def _object_store(self, location: Location, prefix: str, uri: str, store_name: str) -> ObjectStore:
        client = build_client(location, lambda: self._settings(location.kind, store_name))
        return ObjectStore(client, kind=location.kind, prefix=prefix, uri=uri)

    def _url(self, uri: str) -> Callable[[], str]:
        return lambda: self.full_url(uri)

    def _http(self, store_name: str) -> Callable[[], HttpSettings]:
        def settings() -> HttpSettings:
            found = self._settings("http", store_name)
            if not isinstance(found, HttpSettings):
                raise StoreSettingsError(f"store {store_name!r} is of kind {found.kind!r} now")
            return found

        return settings

    def _settings(self, kind: StoreKind, store_name: str) -> StoreSettings:
        stores = self._current().stores
        found = stores.get(store_name)
        if found is not None and (found.kind == kind or kind != "local"):
            if found.kind != kind:
                raise StoreSettingsError(f"store {store_name!r} is of kind {found.kind!r}, its URI is of kind {kind!r}")
            return found
        if self._ambient or kind in {"local", "http"}:
            return _AMBIENT[kind]
        raise StoreSettingsError(
            f"the store file has no store {store_name!r} (it has {', '.join(map(repr, stores)) or 'none'}): add an "
            f'entry of kind {kind!r}, with keys or "ambient": true'
        )


class _WatchedFile:
    """The store file as it was last readable; asked from several threads."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()  # signature and document belong to the same bytes
        self._looked_at = clock()
        self._signature, self._document = _read(path)

    def current(self) -> StoreFile:
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_AGAIN_SECONDS:
                self._looked_at = now
                self._refresh()
            return self._document

    def _refresh(self) -> None:
        try:
            signature = _signature(self._path.stat())
        except OSError:
            signature = (-1, -1, -1)
        if signature == self._signature:
            return
        # Also after a failure: one log line for each new state of the file.
        self._signature = signature
        try:
            self._signature, self._document = _read(self._path)
        except StoreSettingsError as error:
            log.warning("the last good credentials stay in use: %s", error)
        else:
            log.info("store file %s was read again", self._path)


def _signature(found: os.stat_result) -> tuple[int, int, int]:
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _read(path: Path) -> tuple[tuple[int, int, int], StoreFile]:
    try:
        with path.open("rb") as file:
            # Of the open file: a replacement after this is another signature.
            return _signature(os.fstat(file.fileno())), StoreFile.read(file.read(), str(path))
    except OSError as error:
        raise StoreSettingsError(f"store file {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        # The message of a JSON or model error names fields and positions, never their values.
        raise StoreSettingsError(f"store file {path}: {error}") from None
