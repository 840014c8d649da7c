"""Models and adapters of object storage, copied once to this machine's disk under their fingerprint.

One process fetches, others wait for it. The marker is written last: a folder without it is unfinished, and the next
runner goes on where the last one was killed. Knows nothing of vLLM; nothing here is ever deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from pydantic import JsonValue

from airflow_vllm_batch.contract import BatchSpec, ModelSpec
from airflow_vllm_batch.runner.errors import EngineStartError, LocalDiskError
from airflow_vllm_batch.runner.patience import Patience
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectChangedError, ObjectInfo, ObjectNameError, StorageError, Store
from airflow_vllm_batch.storage.model_objects import (
    bare_etag,
    list_weights,
    missing_config,
    objects_fingerprint,
    open_weights,
    weights_in_stores,
)
from airflow_vllm_batch.storage.uris import LOCAL_PRIVATE_PREFIX, check_object_name

log = logging.getLogger(__name__)

VARIABLE: Final = "VLLM_BATCH_MODEL_CACHE"
MARKER: Final = f"{LOCAL_PRIVATE_PREFIX}complete"
"""Of the same prefix as the unfinished files: no object can have such a name here."""
FILES_AT_ONCE = 4
SAY_EVERY_SECONDS = 5.0
LOOK_AGAIN_SECONDS = 0.5
_GIB = 1024**3


class Copy(NamedTuple):
    """A model or adapter in object storage, and where its copy is, or will be."""

    uri: str
    store: Store
    objects: tuple[ObjectInfo, ...]
    fingerprint: str
    folder: Path

    @property
    def size(self) -> int:
        return sum(info.size for info in self.objects)


def cache_root() -> Path:
    """Return the folder of all copies: ``$VLLM_BATCH_MODEL_CACHE``, else one below the home."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "vllm-batch" / "models"


async def look_up(spec: BatchSpec, access: Access, root: Path) -> dict[str, Copy]:
    """List what a spec names by object-store URIs; returns copies by URI, of which nothing is fetched yet.

    :raises EngineStartError: where the objects can be no model or adapter.
    :raises StorageError: where there are none, or they can't be listed.
    :raises ObjectNameError: where a name would leave the folder, or can't be held on a disk.
    """
    return {
        weights.uri: await look_at(open_weights(access, spec, weights.uri), weights.uri, weights.configs, root)
        for weights in weights_in_stores(spec)
    }


async def look_at(store: Store, uri: str, configs: tuple[str, ...], root: Path) -> Copy:
    """List one model or adapter; raises as :func:`look_up`."""
    objects = await list_weights(store)
    names = {info.name for info in objects}
    for name in names:
        check_object_name(name, "local", uri=store.uri(name))
        if file := next((str(above) for above in PurePosixPath(name).parents if str(above) in names), None):
            raise ObjectNameError(f"{store.uri(file)!r} is an object and a folder of objects: no disk holds both")
    if not names & set(configs):
        raise EngineStartError(missing_config(uri, configs), passing=False)
    fingerprint = objects_fingerprint(objects)
    return Copy(uri, store, objects, fingerprint, root.absolute() / fingerprint.partition(":")[2])


def local_names(
    model: ModelSpec, args: Mapping[str, JsonValue], copies: Mapping[str, Copy]
) -> tuple[ModelSpec, dict[str, JsonValue]]:
    """Return model and engine arguments with folders in place of URIs. Rows go on naming the model as the user did."""

    def place(uri: str) -> str:
        return str(copies[uri].folder) if uri in copies else uri

    def module(item: JsonValue) -> JsonValue:
        if isinstance(item, dict):
            return {**item, "path": place(str(item.get("path")))}
        name, equals, path = str(item).partition("=")
        return f"{name}{equals}{place(path)}"

    found = dict(args)
    if (modules := found.get("lora_modules")) is not None and copies.keys() & {each.uri for each in model.adapters}:
        found["lora_modules"] = [module(item) for item in (modules if isinstance(modules, list) else [modules])]
        found.setdefault("enable_lora", True)
    return (
        model.model_copy(
            update={
                "name": place(model.name),
                "served_names": model.served_names or (model.name,) if model.name in copies else model.served_names,
                "adapters": tuple(each.model_copy(update={"uri": place(each.uri)}) for each in model.adapters),
            }
        ),
        found,
    )


@dataclass
class Fetcher:
    """Brings copies here.

    :param note: told every few seconds, while there is something new, what was fetched.
    :param patience: with storage that is away; a store that says no is believed at once.
    :param clock: monotonic seconds.
    """

    note: Callable[[str], None]
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = time.monotonic
    look_again_seconds: float = LOOK_AGAIN_SECONDS

    def __post_init__(self) -> None:
        self.patience = replace(self.patience, refused_seconds=0.0)

    async def bring_all(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            await self.bring(copy)

    async def bring(self, copy: Copy) -> None:
        """Return once the copy is complete.

        :raises EngineStartError: where an object was replaced meanwhile; another try finds the new model.
        :raises LocalDiskError: where the disk is full or can't be written.
        :raises StorageError, FileNotFoundError: where an object can't be read.
        """
        if _is_complete(copy):
            log.info("%s is here already: %s", copy.uri, copy.folder)
            return
        with _local_disk(copy.folder):
            copy.folder.mkdir(parents=True, exist_ok=True)
        async with self._only_writer(copy):
            if not _is_complete(copy):
                await self._fetch(copy)

    @contextlib.asynccontextmanager
    async def _only_writer(self, copy: Copy) -> AsyncIterator[None]:
        """Hold the lock of a copy, which ends with the process, however it dies."""
        with contextlib.ExitStack() as stack:
            with _local_disk(copy.folder):
                lock = stack.enter_context(copy.folder.with_suffix(".lock").open("ab"))
            seen = -1
            said_at = self.clock() - SAY_EVERY_SECONDS
            while not _try_lock(lock.fileno(), copy.folder):
                if self.clock() - said_at >= SAY_EVERY_SECONDS:
                    said_at = self.clock()
                    # A writer that hangs gives no sign of life, and so neither do we.
                    if (size := _bytes_below(copy.folder)) != seen:
                        seen = size
                        self.note(f"waiting for another process that fetches the model: {size / _GIB:.2f} GiB so far")
                await asyncio.sleep(self.look_again_seconds)
            yield

    async def _fetch(self, copy: Copy) -> None:
        started = self.clock()
        missing = [
            (number, info) for number, info in enumerate(copy.objects) if _size_of(copy.folder / info.name) != info.size
        ]
        wanted = sum(info.size for _, info in missing)
        if wanted > (free := shutil.disk_usage(copy.folder).free):
            raise LocalDiskError(
                f"{copy.uri} needs {wanted / _GIB:.1f} GiB and {copy.folder.parent} has {free / _GIB:.1f} GiB free: "
                f"make room, or point {VARIABLE} to a larger volume"
            )
        log.info(
            "fetching %s: %d of %d objects, %.2f GiB, to %s",
            copy.uri,
            len(missing),
            len(copy.objects),
            wanted / _GIB,
            copy.folder,
        )
        meter = _Meter(copy.uri, copy.size, copy.size - wanted, self.note, self.clock)
        room = asyncio.Semaphore(FILES_AT_ONCE)

        async def one(number: int, info: ObjectInfo) -> None:
            async with room:
                await self.patience.keep_trying(
                    lambda: _fetch_file(copy, number, info, meter),
                    on_failure=lambda error: log.warning("tried again: %s", error),
                )

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, info in missing:
                    tasks.create_task(one(number, info))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        # A crash before this leaves files without a marker: the next runner keeps those of the right size.
        await asyncio.to_thread(_write_marker, copy)
        self.note(f"{copy.uri} is here: {copy.size / _GIB:.2f} GiB")
        log.info("fetched %s in %.1f s", copy.uri, self.clock() - started)


@dataclass
class _Meter:
    uri: str
    total: int
    done: int
    note: Callable[[str], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._said_at = self.clock()

    def add(self, count: int) -> None:
        self.done += count
        if count > 0 and self.clock() - self._said_at >= SAY_EVERY_SECONDS:
            self._said_at = self.clock()
            self.note(f"fetching {self.uri}: {self.done / _GIB:.2f} of {self.total / _GIB:.2f} GiB")


async def _fetch_file(copy: Copy, number: int, info: ObjectInfo, meter: _Meter) -> None:
    path, part = copy.folder / info.name, copy.folder / f"{LOCAL_PRIVATE_PREFIX}{number}.part"
    if not info.size:  # may be the sign of an empty folder, which is listed under a name that can't be read
        with _local_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return
    written = 0
    try:
        now = await copy.store.head(info.name)
        if (now.size, bare_etag(now.etag)) != (info.size, bare_etag(info.etag)):
            raise ObjectChangedError(f"{copy.store.uri(info.name)} was replaced")
        with contextlib.ExitStack() as stack:
            with _local_disk(part):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(part.open("wb", buffering=0))
            async for chunk in copy.store.stream(info.name, etag=now.etag):
                with _local_disk(part):
                    await asyncio.to_thread(_write_all, file, chunk)
                written += len(chunk)
                meter.add(len(chunk))
            if written != info.size:
                raise StorageError(f"{copy.store.uri(info.name)} gave {written} of {info.size} bytes")
            with _local_disk(part):
                # The size is all that the next runner looks at: after a power failure it must not lie.
                await asyncio.to_thread(os.fsync, file.fileno())
        with _local_disk(path):
            part.replace(path)
    except BaseException as error:
        meter.add(-written)
        if isinstance(error, ObjectChangedError):
            raise EngineStartError(
                f"{copy.uri} was replaced while it was fetched ({error}); another try takes the new one", passing=True
            ) from error
        raise


def _write_all(file: FileIO, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


def _is_complete(copy: Copy) -> bool:
    return (copy.folder / MARKER).is_file() and all(
        _size_of(copy.folder / info.name) == info.size for info in copy.objects
    )


def _write_marker(copy: Copy) -> None:
    document = {
        "uri": copy.uri,
        "fingerprint": copy.fingerprint,
        "files": {info.name: info.size for info in copy.objects},
    }
    part = copy.folder / f"{MARKER}.part"
    with _local_disk(part):
        with part.open("w") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(copy.folder / MARKER)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _bytes_below(folder: Path) -> int:
    return sum(_size_of(path) or 0 for path in folder.rglob("*") if path.is_file())


def _try_lock(descriptor: int, folder: Path) -> bool:
    try:
        with _local_disk(folder):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    except LocalDiskError as error:
        raise LocalDiskError(f"{error} (the cache needs a file system with locks)") from error
    return True


@contextlib.contextmanager
def _local_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalDiskError(
            f"the model cache can't be written: {path}: {error.strerror or error}; make room, or point {VARIABLE} to "
            "another folder"
        ) from error
