"""The runner's folder on the local disk: gone when it ends; where it could not, the next runner here sweeps it away."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "vllm-batch-spool-"
_LOCK = "owner.lock"
_YOUNG_SECONDS = 60.0
"""A folder so young may be one whose owner has yet to lock it."""


@contextlib.contextmanager
def open_spool() -> Iterator[Path]:
    """Give an empty folder below TMPDIR.

    Its owner holds a lock that ends with the process, however it dies. Folders without an owner are removed: they hold
    whole inputs, and a host with a runner that is killed every night would fill up.
    """
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = folder / "files"
            files.mkdir()
            yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path, *, now: float | None = None) -> list[Path]:
    """Remove folders whose owner is dead and return them.

    :param now: seconds since the epoch.
    """
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            age = (time.time() if now is None else now) - folder.stat().st_mtime
            if age < _YOUNG_SECONDS or folder.stat().st_uid != os.getuid() or not _is_orphan(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    if removed:
        log.info("%d folders of runners that were killed are removed from %s", len(removed), parent)
    return removed


def _is_orphan(folder: Path) -> bool:
    with (folder / _LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
