"""Storage for a command: a store file where one is given, else what the environment offers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import SecretStr

from airflow_vllm_batch.cli.errors import UsageError
from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.settings import ServerSettings, StoreFile, StoreSettingsError

API_KEY_VARIABLES = ("VLLM_BATCH_API_KEY", "OPENAI_API_KEY")


def open_access(store: str | None, uris: Iterable[str] = ()) -> Access:
    """Return access to storage.

    :param store: path of a store file.
    :param uris: what the user typed: full signed URLs are kept here, since specs hold them without their query.
    :raises UsageError: where the store file can't be read, or is given beside a signed URL.
    """
    signed = {without_query(uri): SecretStr(uri) for uri in uris if without_query(uri) != uri}
    if store is not None:
        if signed:
            raise UsageError("with --store the full signed URL belongs into the file, under 'urls'")
        try:
            return Access.from_file(Path(store))
        except StoreSettingsError as error:
            raise UsageError(str(error)) from error
    key = next((value for name in API_KEY_VARIABLES if (value := os.environ.get(name))), None)
    document = StoreFile(urls=signed, server=ServerSettings(api_key=SecretStr(key)) if key else None)
    return Access(lambda: document, ambient=True)


def absolute(uri: str) -> str:
    """Return a local path as an absolute one, a final slash kept; every other URI as it is."""
    if "://" in uri:
        return uri
    path = os.path.abspath(uri)  # noqa: PTH100  pathlib would resolve nothing but drop the slash all the same
    return f"{path}/" if uri.endswith("/") and path != "/" else path
