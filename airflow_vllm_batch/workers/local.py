"""The runner as a child process of the Airflow task. The child gets nothing of Airflow's: no variable, no descriptor.

The task process has the supervisor's socket as file descriptor 0 and secrets in its environment. The child has a pipe
of its own instead, whose end of file means that the task is gone, and only variables of a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from airflow_vllm_batch import __version__
from airflow_vllm_batch.contract import ExitCode
from airflow_vllm_batch.redaction import MASK, Redactor
from airflow_vllm_batch.storage.settings import StoreFile, write_store_file
from airflow_vllm_batch.workers.base import EndKind, Launch, WorkerEnd, WorkerUnusableError
from airflow_vllm_batch.workers.output import LineSplitter

PASSED_ON: Final = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_.*|LD_.*|CUDA.*|NVIDIA_.*|HF_.*|VLLM_.*|OMP_.*|SSL_.*"
    r"|(REQUESTS|AWS|CURL)_CA_BUNDLE|(HTTPS?|ALL|NO|FTP)_PROXY|(https?|all|no|ftp)_proxy"
)
"""Names of the variables that the child inherits."""

CHECK_SECONDS = 120.0
_FLUSH_SECONDS = 5.0
_STORE_FILE = "store.json"

_CHECK = """
import importlib.util, json
import airflow_vllm_batch
shared = ("aiohttp", "jiter", "msgspec", "obstore", "pydantic", "zstandard")
print(json.dumps({
    "version": airflow_vllm_batch.__version__,
    "missing": [name for name in shared if importlib.util.find_spec(name) is None],
    "vllm": importlib.util.find_spec("vllm") is not None,
}))
"""


@dataclass(kw_only=True, repr=False)
class LocalWorker:
    """Runs on the machine of the Airflow worker.

    :param python: the interpreter that has vLLM and this package; by default the one that runs Airflow.
    :param env_vars: variables for the runner besides those it inherits (see ``PASSED_ON``). Values are never shown.
    """

    python: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)

    kind: ClassVar[str] = "local"
    template_fields: ClassVar[tuple[str, ...]] = ("python", "env_vars")
    can_defer: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = True
    tells_progress: ClassVar[bool] = True

    def copy(self) -> Self:
        return type(self)(python=self.python, env_vars=dict(self.env_vars))

    def serialize(self) -> dict[str, Any]:
        return {"kind": self.kind, "python": self.python, "env_vars": dict.fromkeys(sorted(self.env_vars), MASK)}

    def __repr__(self) -> str:
        return f"LocalWorker(python={self.python!r}, env_vars={dict.fromkeys(sorted(self.env_vars), MASK)!r})"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the child's variables.

        :raises WorkerUnusableError: where ``env_vars`` are not pairs of strings.
        """
        if not isinstance(self.env_vars, dict) or not all(
            isinstance(name, str) and isinstance(value, str) for name, value in self.env_vars.items()
        ):
            raise WorkerUnusableError("LocalWorker: env_vars must map names to strings")
        passed_on = {name: value for name, value in inherited.items() if PASSED_ON.fullmatch(name)}
        return {**passed_on, "PYTHONUNBUFFERED": "1", **self.env_vars}

    def command(self, *arguments: str) -> list[str]:
        # -P: the task's working folder, often that of the DAGs, must not shadow packages.
        return [self.python or sys.executable, "-P", *arguments]

    async def check(self, engine: str) -> list[str]:
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                self.command("-c", _CHECK),
                env=self.environment(os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_SECONDS,
                check=False,
            )
        except OSError as error:
            raise WorkerUnusableError(f"{self._shown_python}: {error.strerror}: give the path of a Python") from error
        except subprocess.TimeoutExpired as error:
            raise WorkerUnusableError(f"{self._shown_python} did not start within {CHECK_SECONDS:.0f} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [ExitCode.describe(done.returncode)])[-1]
            raise WorkerUnusableError(
                f"{self._shown_python} can't import airflow_vllm_batch ({last[:300]}): install it there with "
                f"pip install 'airflow-provider-vllm-batch[vllm]=={__version__}'. The runner inherits no PYTHONPATH; "
                "where it needs one, put it into env_vars"
            )
        return self._judge_check(json.loads(done.stdout.strip().splitlines()[-1]), engine)

    def _judge_check(self, found: dict[str, Any], engine: str) -> list[str]:
        if found["missing"]:
            raise WorkerUnusableError(
                f"{self._shown_python} lacks {', '.join(found['missing'])}: "
                f"pip install 'airflow-provider-vllm-batch=={__version__}' there"
            )
        if engine == "vllm" and not found["vllm"]:
            raise WorkerUnusableError(
                f"{self._shown_python} has no vLLM: pip install 'airflow-provider-vllm-batch[vllm]' there, name "
                'another one with LocalWorker(python=…), or try the DAG without a model with engine="echo"'
            )
        if found["version"] != __version__:
            return [f"{self._shown_python} has airflow_vllm_batch {found['version']}, Airflow {__version__}"]
        return []

    @property
    def _shown_python(self) -> str:
        return f"LocalWorker's interpreter {self.python or sys.executable!r}"

    async def start(self, launch: Launch, emit: Callable[[str], None]) -> LocalProcess:
        folder = Path(tempfile.mkdtemp(prefix="vllm-batch-"))  # 0700
        try:
            store_file = folder / _STORE_FILE
            write_store_file(store_file, launch.store)
            # A fork takes milliseconds, and what follows has to see its end even if this loop is torn down.
            process = subprocess.Popen(  # noqa: ASYNC220, S603
                self.command(
                    "-m",
                    "airflow_vllm_batch.runner",
                    "--spec",
                    launch.spec_uri,
                    "--store",
                    str(store_file),
                    "--stop-on-eof",
                ),
                env=self.environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                close_fds=True,
                start_new_session=True,  # its group is what is killed when it does not stop
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return LocalProcess(process, folder, Redactor(launch.store.secrets()), emit)


class LocalProcess:
    """A runner that is our child. Made inside a running event loop, which learns of the end at once."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        redact: Redactor,
        emit: Callable[[str], None],
    ) -> None:
        self._process = process
        self._folder = folder
        self._redact = redact
        self._emit = emit
        self._asked_to_stop = False
        self._end: WorkerEnd | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        # Threads, since a full pipe would stop the runner while the loop waits for storage or for Airflow.
        self._pump = threading.Thread(target=self._pump_lines, name="vllm-batch-output", daemon=True)
        self._waiter = threading.Thread(target=self._await_exit, name="vllm-batch-exit", daemon=True)
        self._pump.start()
        self._waiter.start()

    @property
    def description(self) -> str:
        return f"process {self._process.pid} on {socket.gethostname()}"

    def poll(self) -> WorkerEnd | None:
        if self._end is None and (code := self._process.poll()) is not None:
            # Engine processes of a runner that died without a word hold the GPU and our pipe.
            self._kill_group()
            self._pump.join(_FLUSH_SECONDS)  # its last words belong before ours
            self._end = _end(code, asked=self._asked_to_stop)
        return self._end

    async def wait(self, timeout_seconds: float) -> WorkerEnd | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_seconds)
        return self.poll()

    def renew(self, store: StoreFile) -> None:
        self._redact = Redactor([*store.secrets(), *self._redact.secrets])
        write_store_file(self._folder / _STORE_FILE, store)

    def ask_to_stop(self) -> None:
        if self._asked_to_stop:
            return
        self._asked_to_stop = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    async def stop(self, *, wait_seconds: float) -> WorkerEnd:
        self.ask_to_stop()
        if end := await self.wait(wait_seconds):
            return end
        self._kill_group()
        await asyncio.to_thread(self._process.wait)
        end = self.poll()
        assert end is not None  # it was waited for
        return end

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _await_exit(self) -> None:
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._ended.set)

    def _pump_lines(self) -> None:
        assert self._process.stdout is not None  # asked for when it was started
        lines = LineSplitter()
        with self._process.stdout as output:
            while chunk := output.read(65536):
                for line in lines.feed(chunk):
                    self._emit(self._redact(line))
        for line in lines.finish():
            self._emit(self._redact(line))


def _end(code: int, *, asked: bool) -> WorkerEnd:
    if code >= 0:
        return WorkerEnd(EndKind.EXITED, code, f"the runner ended with exit code {ExitCode.describe(code)}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if asked:
        return WorkerEnd(EndKind.KILLED, code, f"the runner was told to stop and ended by {name}")
    hint = (
        "out of memory is the usual cause: look at the machine's kernel log, lower max_num_seqs or max_model_len"
        if code == -signal.SIGKILL
        else "look at the log above"
    )
    return WorkerEnd(EndKind.KILLED, code, f"the runner was killed by {name} ({hint})")
