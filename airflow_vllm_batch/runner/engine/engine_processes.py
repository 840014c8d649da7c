"""The engine's processes and shared memory: known while it is healthy, gone when it is stopped.

A dead EngineCore leaves a worker that is no child of ours any more and goes on computing, so looking for children
after the death is too late. psutil comes with vLLM, and only with it.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\S+)$", re.MULTILINE)
STOP_SECONDS = 10.0


class EngineProcesses:
    """Processes that were started by this one, and what they share. Taken once, when the engine is ready."""

    def __init__(self) -> None:
        import psutil

        # The resource tracker ends by itself once nobody holds its pipe, and then unlinks shared memory.
        self._processes: list[Any] = [
            process
            for process in psutil.Process().children(recursive=True)
            if not any("resource_tracker" in part for part in process.cmdline())
        ]
        self._shared: set[Path] = set()
        for process in self._processes:
            # A process that ends meanwhile, or that we may not look into, has nothing to tell.
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._shared.update(Path(name) for name in _SHARED_MEMORY.findall(maps))

    def kill(self) -> None:
        """End every process at once, as for an engine that hangs."""
        import psutil

        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, seconds: float = STOP_SECONDS) -> None:
        """Return when every process is gone, by force after ``seconds``, and its shared memory with it."""
        import psutil

        _, alive = psutil.wait_procs(self._processes, timeout=seconds)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        for path in self._shared:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._processes, self._shared = [], set()
