"""A copy of an input in the run folder, for a worker that can't read the source itself, made while it is checked."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from airflow_vllm_batch.arguments import StageInput
from airflow_vllm_batch.contract import InputFile
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.compression import ZstdWriter, decompress, zstd_file
from airflow_vllm_batch.storage.run_folder import RunFolder
from airflow_vllm_batch.storage.uris import parse_uri


def wanted(stage: StageInput, inputs: Sequence[InputFile], *, worker_reads_them: bool) -> list[int]:
    """Return the indexes of the inputs to copy.

    ``auto`` copies what lies on a disk or behind http(s), where the worker runs elsewhere; objects of a store are read
    in place, pinned by their ETag.
    """
    if stage == "always":
        return list(range(len(inputs)))
    if stage == "never" or worker_reads_them:
        return []
    return [index for index, source in enumerate(inputs) if parse_uri(source.uri).kind in {"local", "http"}]


class InputCopy:
    """One input on its way into the run folder. The copy is put whole, or not at all."""

    def __init__(self, folder: RunFolder, index: int, scratch: Path) -> None:
        self._folder = folder
        self._path = scratch / f"{index:02d}.jsonl.zst"
        self.name = folder.layout.staged_input(index)
        self._whole = False

    async def tee(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Hand on a stream and keep what goes by; what is not read to its end is no copy."""
        with zstd_file(self._path) as writer:
            async for chunk in chunks:
                await _write(writer, chunk)
                yield chunk
        self._whole = True

    async def put(self) -> None:
        """Put the copy. Raises ``StorageError``."""
        if not self._whole:
            raise RuntimeError(f"{self.name} was not read to its end")
        await self._folder.store.put_file(self.name, self._path)
        self._path.unlink()


async def _write(writer: ZstdWriter, chunk: bytes) -> None:
    await asyncio.to_thread(writer.write, chunk)


async def copy_whole(copy: InputCopy, access: Access, source: InputFile) -> None:
    """Copy an input that nothing else reads; raises as its stream does."""
    stream = access.open_source(source.uri, source.store).stream(etag=source.etag)
    async for _ in copy.tee(decompress(stream, source.uri)):
        pass
    await copy.put()


async def still_there(folder: RunFolder, before: InputFile, now: InputFile) -> bool:
    """Whether the copy that an earlier try made is of the bytes that the input has now."""
    if before.staged is None or before.etag is None or (before.uri, before.etag) != (now.uri, now.etag):
        return False
    try:
        await folder.store.head(before.staged)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vllm-batch-input-") as name:
        yield Path(name)
