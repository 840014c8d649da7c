"""The URIs and connections of a task to what a spec and a store file say of them. Contacts no store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from airflow_vllm_batch.arguments import Refusal
from airflow_vllm_batch.connections import BY_SCHEME, Connected, connect, is_http_connection
from airflow_vllm_batch.contract import ExitCode, InputFile, OutputTarget
from airflow_vllm_batch.contract.layout import default_state_uri, is_one_file
from airflow_vllm_batch.contract.spec import without_query
from airflow_vllm_batch.storage.model_objects import STORE, is_object_uri
from airflow_vllm_batch.storage.settings import StoreFile, StoreSettings
from airflow_vllm_batch.storage.uris import parse_uri

_PUT = "put"
"""Store of an http(s) output: its state lies elsewhere, and the runner finds its spec by the store ``output``."""


class Reached(NamedTuple):
    """Where a task reads and writes, and how it gets there."""

    inputs: tuple[InputFile, ...]
    output: OutputTarget
    store_file: Callable[[], StoreFile]
    """Builds the store file with the credentials of now. Raises ``ConnectionUnusableError``."""


class _Output(NamedTuple):
    target: Connected | None
    """Of an http(s) PUT only."""
    state: Connected


def reach(
    *,
    input_uri: str,
    output_uri: str,
    state_uri: str | None,
    input_conn_id: str | None,
    output_conn_id: str | None,
    weights: Sequence[str] = (),
    model_conn_id: str | None = BY_SCHEME,
) -> Reached:
    """Find out how input, output and state are reached, and what of the weights lies in object storage.

    :param weights: names of the model and its adapters, whatever they are.
    :raises Refusal: where the URIs don't go together.
    :raises ConnectionUnusableError, ProviderMissingError: from :func:`connections.connect`.
    :raises ValueError: where a URI can't be split.
    """
    connections = _Connections()
    source = connections.connect(_input_uri(input_uri, input_conn_id), input_conn_id)
    output = _reach_output(connections, output_uri, state_uri, output_conn_id)
    full_urls = [source.uri, *([output.target.uri] if output.target else [])]
    urls = {without_query(url): url for url in full_urls if without_query(url) != url}
    stores: dict[str, Callable[[], StoreSettings]] = {"input": source.settings, "output": output.state.settings}
    if in_stores := [name for name in weights if is_object_uri(name)]:
        if len({parse_uri(uri).kind for uri in in_stores}) > 1:
            raise Refusal(
                ExitCode.USAGE,
                f"model and adapters lie in several kinds of object storage ({', '.join(in_stores)}), and "
                "model_conn_id opens one: copy them to one of them",
            )
        stores[STORE] = connections.connect(in_stores[0], model_conn_id).settings
    if output.target:
        stores[_PUT] = output.target.settings
        target = OutputTarget(uri=without_query(output.target.uri), state_uri=output.state.uri, store=_PUT)
    else:
        uri = absolute(output_uri)
        target = OutputTarget(uri=uri if is_one_file(uri) else output.state.uri, state_uri=output.state.uri)

    def store_file() -> StoreFile:
        return StoreFile.model_validate({"stores": {name: build() for name, build in stores.items()}, "urls": urls})

    return Reached((InputFile(uri=without_query(source.uri)),), target, store_file)


def _input_uri(uri: str, conn_id: str | None) -> str:
    below_url = conn_id is not None and conn_id != BY_SCHEME and "://" not in uri and is_http_connection(conn_id)
    return uri if below_url else absolute(uri)


def absolute(uri: str) -> str:
    """Return a plain path made absolute, since an XCom is read elsewhere; anything else as it is."""
    if "://" in uri or not uri:
        return uri
    folder = "/" if uri.endswith("/") else ""
    return f"{os.path.abspath(uri).rstrip('/')}{folder}"  # noqa: PTH100  of '..' pathlib would ask the disk


def _reach_output(connections: _Connections, output_uri: str, state_uri: str | None, conn_id: str | None) -> _Output:
    named = conn_id is not None and conn_id != BY_SCHEME
    over_http = conn_id is not None and named and is_http_connection(conn_id)
    if not over_http and not output_uri.startswith(("http://", "https://")):
        output_uri = absolute(output_uri)
        state = default_state_uri(output_uri)
        if state_uri and absolute(state_uri).rstrip("/") != (state or "").rstrip("/"):
            if not is_one_file(output_uri):
                raise Refusal(
                    ExitCode.USAGE,
                    f"state_uri goes with one object for all rows; {output_uri!r} is a folder and holds its own state",
                )
            state = absolute(state_uri)
        return _Output(None, connections.connect(_as_folder(state or output_uri), conn_id))
    if not state_uri:
        raise Refusal(
            ExitCode.USAGE,
            "an http(s) output takes one PUT and holds nothing else: give state_uri, a folder (s3://…, a path) for "
            "manifest.json and what a retry needs",
        )
    if parse_uri(state_uri).kind == "http":
        raise Refusal(ExitCode.USAGE, "state_uri must be a folder of an object store or a path, not an http(s) URL")
    # A connection that can't open the URL is meant for the state beside it.
    target = connections.connect(output_uri, conn_id if over_http or not named else None)
    state_conn_id = BY_SCHEME if over_http else conn_id
    return _Output(target, connections.connect(_as_folder(absolute(state_uri)), state_conn_id))


def _as_folder(uri: str) -> str:
    return uri if uri.endswith("/") else f"{uri}/"


class _Connections:
    """Asks once for each connection: a hook may call a token service, and says so in the log."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None], Connected] = {}

    def connect(self, uri: str, conn_id: str | None) -> Connected:
        kind = parse_uri(uri).kind
        if kind in {"local", "http"}:
            return connect(uri, conn_id)
        known = self._known.get((kind, conn_id))
        if known is None:
            known = self._known[(kind, conn_id)] = connect(uri, conn_id)
        return replace(known, uri=uri)
