"""What a model is, beyond its name: a checkpoint overwritten in place is a new model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from airflow_vllm_batch.contract import BatchSpec

HUB_FOLDER = "models--"


class Fingerprints(NamedTuple):
    """Of a spec's model and adapters; null where one can't be told here, such as a hub model that is not cached yet."""

    model: str | None
    adapters: dict[str, str | None]
    """By adapter name."""


def fingerprints_of(spec: BatchSpec) -> Fingerprints:
    """Return what identifies the weights that a spec names, as this machine sees them."""
    model = spec.model
    if spec.engine.kind != "vllm":
        return Fingerprints(model.fingerprint, {adapter.name: adapter.fingerprint for adapter in model.adapters})
    return Fingerprints(
        model.fingerprint or model_fingerprint(model.name, model.revision),
        {adapter.name: adapter.fingerprint or model_fingerprint(adapter.uri) for adapter in model.adapters},
    )


def model_fingerprint(name: str, revision: str | None = None) -> str | None:
    """Return the fingerprint of a model as this machine sees it; null where it can't be told.

    A folder or file: digest of the relative names, sizes and modification times. A hub name: the commit in the local
    hub cache that ``revision`` (``main``) points to.
    """
    path = Path(name)
    if path.exists():
        return "path:" + _digest(path)
    commit = _cached_commit(name, revision or "main")
    return f"hub:{commit}" if commit else None


def names_a_path(name: str) -> bool:
    """Whether a model name can only mean a place on this disk: hub names have at most one slash, and not in front."""
    return name.startswith(("/", "./", "../", "~", ".")) or name.count("/") > 1


def _digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        found = file.stat()
        relative = file.relative_to(path) if path.is_dir() else file.name
        digest.update(f"{relative}\0{found.st_size}\0{found.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _cached_commit(name: str, revision: str) -> str | None:
    # The layout of https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    default = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    home = os.environ.get("HF_HUB_CACHE") or default
    folder = Path(home) / (HUB_FOLDER + name.replace("/", "--"))
    if (folder / "snapshots" / revision).is_dir():
        return revision
    try:
        return (folder / "refs" / revision).read_text().strip() or None
    except OSError:
        return None
