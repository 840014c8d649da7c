"""A model or an adapter that is a folder of objects: how it is opened, and what identifies it. Reads no weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from airflow_vllm_batch.contract import BatchSpec
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectInfo, ObjectNameError, StorageError, Store
from airflow_vllm_batch.storage.uris import KINDS, parse_uri

STORE: Final = "model"
"""Entry of the store file that opens models and adapters."""
MODEL_CONFIGS: Final = ("config.json", "params.json")
"""One of them is in every model's folder; the second one is Mistral's own format."""
ADAPTER_CONFIGS: Final = ("adapter_config.json",)
_FALLBACK: Final = "input"
_OBJECT_KINDS: Final = frozenset({"s3", "gcs", "azure"})


class Weights(NamedTuple):
    """A model or adapter that a spec names by an object-store URI."""

    uri: str
    configs: tuple[str, ...]
    """One of these objects must be there."""


def is_object_uri(name: str) -> bool:
    """Whether the name of a model or adapter is a URI of an object store."""
    scheme, separator, _ = name.partition("://")
    return bool(separator) and KINDS.get(scheme.lower()) in _OBJECT_KINDS


def weights_in_stores(spec: BatchSpec) -> list[Weights]:
    """Return the model and the adapters that vLLM is to load from object storage, each once."""
    if spec.engine.kind != "vllm":
        return []
    adapters = (Weights(adapter.uri, ADAPTER_CONFIGS) for adapter in spec.model.adapters)
    named = dict.fromkeys([Weights(spec.model.name, MODEL_CONFIGS), *adapters])
    return [weights for weights in named if is_object_uri(weights.uri)]


def open_weights(access: Access, spec: BatchSpec, uri: str) -> Store:
    """Open the folder of a model or adapter by the entry ``model``, by ``input`` where there is none that fits.

    :raises ObjectNameError: where the URI can't be split or held exactly.
    :raises StoreSettingsError: where no entry opens it.
    """
    try:
        parse_uri(uri)
    except ValueError as error:
        raise ObjectNameError(f"model or adapter: {error}") from error
    own = spec.model.store or STORE
    return access.open_folder(uri, next((name for name in (own, _FALLBACK) if access.opens(uri, name)), own))


async def list_weights(store: Store) -> tuple[ObjectInfo, ...]:
    """Return the objects of a model or adapter, without the empty ones that consoles put to show a folder.

    :raises StorageError: where there is none, or they can't be listed.
    """
    found = [info async for info in store.list()]
    folders = {str(above) for info in found for above in PurePosixPath(info.name).parents}
    objects = tuple(info for info in found if info.size or info.name not in folders)
    if not objects:
        raise StorageError(f"there is no object below {store.uri()}: name the folder that holds the model's files")
    return objects


def objects_fingerprint(objects: Iterable[ObjectInfo]) -> str:
    """Return what identifies these weights wherever they lie: a digest of relative names, sizes and ETags."""
    digest = hashlib.blake2b(digest_size=16)
    for info in sorted(objects):
        version = bare_etag(info.etag) or (info.modified.isoformat() if info.modified else "")
        digest.update(f"{info.name}\0{info.size}\0{version}\n".encode())
    return f"store:{digest.hexdigest()}"


def bare_etag(etag: str | None) -> str | None:
    """Return an ETag without its quotes: Azure quotes it in a reply, but not in a listing."""
    return etag.strip('"') if etag is not None else None


def missing_config(uri: str, configs: tuple[str, ...]) -> str:
    """Say that a folder can be no model or adapter."""
    what = "adapter" if configs == ADAPTER_CONFIGS else "model"
    return (
        f"{what} {uri!r} has no {configs[0]}: name the folder whose objects are {configs[0]} and the weights "
        "(a key is literal, and a folder above or below is another one)"
    )


def with_fingerprints(spec: BatchSpec, by_uri: dict[str, str]) -> BatchSpec:
    """Return the spec with the fingerprints of weights in object storage, in place of what it said of them."""
    model = spec.model
    adapters = tuple(
        adapter.model_copy(update={"fingerprint": by_uri.get(adapter.uri, adapter.fingerprint)})
        for adapter in model.adapters
    )
    fingerprint = by_uri.get(model.name, model.fingerprint)
    return spec.model_copy(
        update={"model": model.model_copy(update={"fingerprint": fingerprint, "adapters": adapters})}
    )


async def fingerprinted(spec: BatchSpec, access: Access) -> BatchSpec:
    """Return the spec with the fingerprints that its weights in object storage have now.

    :raises StorageError: where they can't be listed.
    :raises ObjectNameError, StoreSettingsError: from :func:`open_weights`.
    """
    return with_fingerprints(
        spec,
        {
            weights.uri: objects_fingerprint(await list_weights(open_weights(access, spec, weights.uri)))
            for weights in weights_in_stores(spec)
        },
    )
