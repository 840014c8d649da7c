"""A plugin that vLLM loads into each of its processes: they end when the process that started them ends.

vLLM watches for its parent only in its workers, so a runner that is killed would leave an EngineCore that computes, and
holds the GPU, for good. Does nothing in a vLLM that our runner did not start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

MARK = "_VLLM_BATCH_RUNNER_PID"
"""The runner sets it to its process id; its children inherit it. vLLM warns of names that begin with VLLM_."""
PLUGIN = "vllm_batch_parent_death"
"""The name of the entry point, for VLLM_PLUGINS."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Ask for the signal. vLLM calls this in the front end, EngineCore and each worker, after their imports."""
    parent = multiprocessing.parent_process()
    if MARK not in os.environ or parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died during our imports, before the signal was asked for.
    if os.getppid() != parent.pid:
        os._exit(1)
