"""Find out by trying which conditions a store enforces; a store's promise of them is not enough."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from airflow_vllm_batch.contract.layout import RunLayout
from airflow_vllm_batch.storage.base import Conditions, ObjectChangedError, ObjectExistsError, StorageError

if TYPE_CHECKING:
    from airflow_vllm_batch.storage.base import Store


async def probe_conditions(store: Store) -> Conditions:
    """Put one object under a name of its own twice with each condition, then delete it.

    No right to delete is needed: what can't be deleted stays, a few bytes below ``RunLayout.probe_prefix``.

    :raises StorageError: where the folder can't be written or read.
    """
    name = f"{RunLayout.probe_prefix}{uuid.uuid4().hex}"
    try:
        first = await store.put_new(name, b"first")
        create_only = False
        try:
            await store.put_new(name, b"second")
        except ObjectExistsError:
            create_only = True
        if_match = False
        current = await store.head(name)
        if current.etag is not None:
            replaced = await store.put_if_match(name, b"third", current.etag)
            try:
                stale = current.etag if replaced.etag != current.etag else first.etag
                await store.put_if_match(name, b"fourth", stale or "")
            except ObjectChangedError:
                if_match = True
        if await store.get(name) not in {b"third", b"first", b"second", b"fourth"}:
            raise StorageError(f"{store.uri(name)} does not read back as it was written")
        return Conditions(create_only, if_match)
    except FileNotFoundError as error:
        raise StorageError(f"{store.uri(name)} can't be read right after it was written") from error
    finally:
        with contextlib.suppress(OSError):
            await store.delete(name)
