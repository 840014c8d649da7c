from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_vllm_batch.storage.base import ObjectChangedError, StateUnreadableError, StorageError
from airflow_vllm_batch.storage.local import LocalStore

COUNT_UP = """
import asyncio, sys
from pathlib import Path
from airflow_vllm_batch.storage.base import ObjectChangedError
from airflow_vllm_batch.storage.local import LocalStore

async def main():
    store, done = LocalStore(Path(sys.argv[1])), 0
    while done < 25:
        data, info = await store.get_with_info("lease.json")
        try:
            await store.put_if_match("lease.json", str(int(data) + 1).encode(), info.etag)
        except ObjectChangedError:
            continue
        done += 1

asyncio.run(main())
"""

PUT_AND_DIE = """
import asyncio, os, sys
from pathlib import Path
from airflow_vllm_batch.storage.local import LocalStore

def die(source, target, size):
    target.write(b"half")
    target.flush()
    os.kill(os.getpid(), 9)

import shutil
shutil.copyfileobj = die
asyncio.run(LocalStore(Path(sys.argv[1])).put_file("output.jsonl", Path(sys.argv[2])))
"""


def start(script: str, *arguments: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], cwd=Path(__file__).parents[2])


async def names(store: LocalStore) -> list[str]:
    return [info.name async for info in store.list()]


async def test_no_update_is_lost_between_processes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("lease.json", b"0")
    processes = [start(COUNT_UP, tmp_path) for _ in range(3)]
    assert [await asyncio.to_thread(process.wait) for process in processes] == [0, 0, 0]
    assert await store.get("lease.json") == b"75"
    assert await names(store) == ["lease.json"]


async def test_a_writer_killed_half_way_leaves_the_old_object_and_nothing_listed(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "file"
    file.write_bytes(b"new")
    store = LocalStore(folder)
    await store.put("output.jsonl", b"old")
    process = start(PUT_AND_DIE, folder, file)
    assert await asyncio.to_thread(process.wait) == -9
    assert await store.get("output.jsonl") == b"old"
    assert await names(store) == ["output.jsonl"]
    left = [path for path in folder.iterdir() if path.name.startswith(".vllm-batch-put-")]
    assert [path.read_bytes() for path in left] == [b"half"]
    # A day later the next put of a file clears it away.
    os.utime(left[0], (0, 0))
    await store.put_file("output.jsonl", file)
    assert sorted(path.name for path in folder.iterdir()) == [".vllm-batch-lock", "output.jsonl"]


async def test_concurrent_creates_have_one_winner(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    results = await asyncio.gather(
        *(store.put_new("a", str(number).encode()) for number in range(20)), return_exceptions=True
    )
    won = [number for number, result in enumerate(results) if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert await store.get("a") == str(won[0]).encode()


async def test_objects_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    await LocalStore(tmp_path).put("a", b"")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


async def test_a_file_that_grows_while_it_is_read_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("a", bytes(2 * 1024 * 1024))
    chunks = store.stream("a")
    await anext(chunks)
    with (tmp_path / "a").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ObjectChangedError, match="written to while it was read"):
        async for _ in chunks:
            pass


async def test_a_file_in_the_place_of_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"can't write .*: (Not a directory|File exists); a file and a folder"):
        await LocalStore(tmp_path / "file").put("a", b"")


async def test_a_link_to_a_folder_is_listed_through(tmp_path: Path) -> None:
    await LocalStore(tmp_path / "real").put("a", b"1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "run" / "dangling").symlink_to(tmp_path / "none")
    assert await names(LocalStore(tmp_path / "run")) == ["linked/a"]


async def test_a_link_that_goes_in_circles_is_unreadable_and_not_absent(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(StateUnreadableError, match="can't read"):
        await LocalStore(tmp_path).get("a")
