"""The runner as a child process, with stand-ins for the interpreter where a real runner would not misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

import pytest

from airflow_vllm_batch.storage.settings import S3Settings, StoreFile
from airflow_vllm_batch.workers import LocalWorker
from airflow_vllm_batch.workers.base import EndKind, Launch, RunningWorker, Worker, WorkerUnusableError
from airflow_vllm_batch.workers.output import LONGEST, LineSplitter
from tests.support.waiting import wait_until

STORE = StoreFile.model_validate(
    {"stores": {"input": {"kind": "s3", "access_key_id": "AK", "secret_access_key": "very-secret-key"}}}
)


def interpreter(folder: Path, body: str) -> str:
    """Make something that is started in the interpreter's place; ``$STORE`` is the store file."""
    path = folder / "python"
    path.write_text(f'#!/bin/bash\nfor a in "$@"; do [ "$p" = --store ] && STORE=$a; p=$a; done\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class Lines(list[str]):
    """What the runner printed; ``seen`` waits for a line."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Event] = {}

    def __call__(self, line: str) -> None:
        self.append(line)
        self._loop.call_soon_threadsafe(self._tell, line)

    def _tell(self, line: str) -> None:
        self._waiting.setdefault(line, asyncio.Event()).set()

    async def seen(self, line: str) -> None:
        await self._waiting.setdefault(line, asyncio.Event()).wait()


async def start(python: str, **fields: object) -> tuple[RunningWorker, Lines]:
    lines = Lines()
    worker = LocalWorker(python=python, **fields)  # type: ignore[arg-type]
    return await worker.start(Launch("/run/spec.json", STORE, 1), lines), lines


# The value


def test_a_local_worker_is_a_worker() -> None:
    worker: Worker = LocalWorker()
    assert not worker.can_defer


def test_equal_workers_are_equal_and_two_parses_show_the_same() -> None:
    one, two = (LocalWorker(python="/p", env_vars={"B": "1", "A": "2"}) for _ in range(2))
    assert one == two
    assert repr(one) == repr(two)
    assert one.serialize() == two.serialize()
    assert one != LocalWorker(python="/q")


def test_neither_repr_nor_serialize_shows_the_value_of_a_variable() -> None:
    worker = LocalWorker(env_vars={"HF_TOKEN": "hf_secret"})
    assert "hf_secret" not in repr(worker) + str(worker.serialize())
    assert repr(worker) == "LocalWorker(python=None, env_vars={'HF_TOKEN': '***'})"


def test_a_copy_shares_nothing_that_a_template_changes() -> None:
    worker = LocalWorker(env_vars={"A": "{{ ds }}"})
    copied = worker.copy()
    copied.env_vars["A"] = "2026-01-01"
    copied.python = "/other"
    assert worker == LocalWorker(env_vars={"A": "{{ ds }}"})


def test_a_misspelled_field_is_refused_where_the_dag_is_parsed() -> None:
    with pytest.raises(TypeError, match="enviroment"):
        LocalWorker(enviroment={})  # type: ignore[call-arg]


# The environment


def test_the_child_inherits_what_is_on_the_list_and_nothing_else() -> None:
    passed = {
        "PATH": "/bin",
        "HOME": "/h",
        "LANG": "C.UTF-8",
        "LC_ALL": "C",
        "LD_LIBRARY_PATH": "/l",
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "HF_HOME": "/hf",
        "VLLM_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": "2",
        "https_proxy": "http://p",
        "NO_PROXY": "localhost",
        "SSL_CERT_FILE": "/c",
        "REQUESTS_CA_BUNDLE": "/c",
        "TMPDIR": "/t",
    }
    kept_back = {
        "AIRFLOW_CONN_X": "s",
        "AIRFLOW__CORE__FERNET_KEY": "s",
        "AIRFLOW_HOME": "/a",
        "_AIRFLOW_X": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "DATABASE_PASSWORD": "s",
        "PYTHONPATH": "/dags",
        "XPATH": "s",
        "LANGUAGE_TOKEN": "s",
    }
    assert LocalWorker().environment({**passed, **kept_back}) == {**passed, "PYTHONUNBUFFERED": "1"}


def test_variables_of_the_worker_win() -> None:
    environment = LocalWorker(env_vars={"HF_HOME": "/mine", "PYTHONPATH": "/x"}).environment({"HF_HOME": "/theirs"})
    assert environment == {"HF_HOME": "/mine", "PYTHONPATH": "/x", "PYTHONUNBUFFERED": "1"}


def test_variables_that_are_no_text_are_refused() -> None:
    with pytest.raises(WorkerUnusableError, match="env_vars must map names to strings"):
        LocalWorker(env_vars={"A": 1}).environment({})  # type: ignore[dict-item]


# Before the start


async def test_this_interpreter_can_run_the_echo_engine() -> None:
    assert await LocalWorker().check("echo") == []


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkerUnusableError, match=r"'/no/python': No such file or directory: give the path"):
        await LocalWorker(python="/no/python").check("echo")


async def test_an_interpreter_without_the_package_is_told_how_to_get_it(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'airflow_vllm_batch'\" >&2; exit 1")
    with pytest.raises(WorkerUnusableError) as caught:
        await LocalWorker(python=python).check("echo")
    assert "can't import airflow_vllm_batch (ModuleNotFoundError" in str(caught.value)
    assert "pip install 'airflow-provider-vllm-batch[vllm]==" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "phrase"),
    [
        ('{"version": "0.1.0", "missing": [], "vllm": false}', "has no vLLM: pip install"),
        ('{"version": "0.1.0", "missing": ["obstore"], "vllm": true}', "lacks obstore"),
    ],
)
async def test_an_interpreter_that_lacks_something_is_refused(tmp_path: Path, found: str, phrase: str) -> None:
    with pytest.raises(WorkerUnusableError) as caught:
        await LocalWorker(python=interpreter(tmp_path, f"echo '{found}'")).check("vllm")
    assert phrase in str(caught.value)


async def test_another_version_of_the_package_is_a_warning(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'echo \'{"version": "9.9", "missing": [], "vllm": true}\'')
    (warning,) = await LocalWorker(python=python).check("vllm")
    assert "has airflow_vllm_batch 9.9, Airflow 0.1.0" in warning


# The process


async def test_the_exit_code_and_every_line_are_told(tmp_path: Path) -> None:
    running, lines = await start(interpreter(tmp_path, "echo one; echo two >&2; printf three; exit 69"))
    end = await running.wait(30)
    assert end is not None
    assert (end.kind, end.exit_code) == (EndKind.EXITED, 69)
    assert end.reason == "the runner ended with exit code 69 (storage)"
    assert sorted(lines) == ["one", "three", "two"]
    assert running.poll() is end


async def test_the_store_file_is_private_and_goes_with_the_worker(tmp_path: Path) -> None:
    running, lines = await start(
        interpreter(tmp_path, 'stat -c "%a" "$STORE" "$(dirname "$STORE")"; cat "$STORE"; echo "at $STORE"')
    )
    await running.wait(30)
    assert lines[:2] == ["600", "700"]
    # The secret is in the file, and redacted from what was printed of it.
    assert any('"secret_access_key": "***"' in line for line in lines)
    path = Path(lines[-1].removeprefix("at "))
    assert "very-secret-key" in path.read_text()
    running.close()
    assert not path.parent.exists()


async def test_renewed_credentials_reach_the_file_and_the_redaction(tmp_path: Path) -> None:
    running, lines = await start(interpreter(tmp_path, 'echo ready; read -r; cat "$STORE"'))
    await lines.seen("ready")
    renewed = S3Settings.model_validate({"access_key_id": "AK", "secret_access_key": "another-secret"})
    running.renew(StoreFile(stores={"input": renewed}))
    running.ask_to_stop()  # SIGTERM ends `read`, and bash
    end = await running.wait(30)
    assert end is not None
    assert "another-secret" in Path(running._folder, "store.json").read_text()  # type: ignore[attr-defined]
    running.close()


async def test_no_secret_is_an_argument_or_a_variable_of_the_process(tmp_path: Path) -> None:
    running, lines = await start(interpreter(tmp_path, 'echo "$*"; env'))
    await running.wait(30)
    assert lines[0].startswith("-P -m airflow_vllm_batch.runner --spec /run/spec.json --store ")
    assert lines[0].endswith(" --stop-on-eof")
    assert "very-secret-key" not in "".join(lines)


async def test_a_runner_that_stops_when_told_is_not_killed(tmp_path: Path) -> None:
    running, lines = await start(
        interpreter(tmp_path, "trap 'echo stopping; exit 75' TERM; echo ready; while :; do sleep 0.05; done")
    )
    await lines.seen("ready")
    end = await running.stop(wait_seconds=30)
    assert (end.kind, end.exit_code) == (EndKind.EXITED, 75)
    assert lines[-1] == "stopping"


async def test_a_runner_that_does_not_stop_is_killed_with_all_it_started(tmp_path: Path) -> None:
    running, lines = await start(
        interpreter(tmp_path, "trap '' TERM; sleep 600 & echo $!; echo ready; while :; do sleep 0.05; done")
    )
    await lines.seen("ready")
    end = await running.stop(wait_seconds=0)
    assert (end.kind, end.exit_code) == (EndKind.KILLED, -signal.SIGKILL)
    assert end.reason == "the runner was told to stop and ended by SIGKILL"
    # The kernel ends what it kills in its own time.
    wait_until(
        lambda: not _is_running(int(lines[0])), seconds=30, what="the end of what was killed", pause_seconds=0.01
    )


async def test_what_a_dead_runner_left_running_is_killed(tmp_path: Path) -> None:
    running, lines = await start(interpreter(tmp_path, "sleep 600 & echo $!; kill -9 $$"))
    end = await running.wait(30)
    assert end is not None
    assert (end.kind, end.exit_code) == (EndKind.KILLED, -signal.SIGKILL)
    assert "out of memory is the usual cause" in end.reason
    # The kernel ends what it kills in its own time.
    wait_until(
        lambda: not _is_running(int(lines[0])), seconds=30, what="the end of what was killed", pause_seconds=0.01
    )


async def test_the_end_of_the_task_is_the_end_of_the_runners_input(tmp_path: Path) -> None:
    running, lines = await start(interpreter(tmp_path, "echo ready; read -r || echo eof; exit 75"))
    await lines.seen("ready")
    process = running._process  # type: ignore[attr-defined]
    process.stdin.close()  # as the kernel does it when the task is killed
    end = await running.wait(30)
    assert end is not None
    assert end.exit_code == 75
    assert lines[-1] == "eof"


async def test_waiting_ends_in_time_and_says_that_it_still_runs(tmp_path: Path) -> None:
    running, _ = await start(interpreter(tmp_path, "read -r"))
    assert await running.wait(0.01) is None
    await running.stop(wait_seconds=30)


def _wait_for_the_end_of(pid: int) -> None:
    # The kernel ends what it kills in its own time.
    wait_until(lambda: not _is_running(pid), seconds=30, what=f"the end of process {pid}", pause_seconds=0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Lines


def test_lines_are_cut_at_line_feeds_wherever_the_bytes_are_cut() -> None:
    lines = LineSplitter()
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\n\nthr") == ["one", "two"]
    assert lines.feed("ée".encode()[:2]) == []
    assert lines.feed("ée".encode()[2:]) == []
    assert lines.finish() == ["thrée"]
    assert lines.finish() == []


@pytest.mark.parametrize(
    "chunks", [[b"10%\r20%\r30%\n"], [b"10%\r", b"20%", b"\r30%\n"], [b"10%\r20%\r", b"30%\r", b"\n"]]
)
def test_of_a_progress_bar_the_last_state_is_kept(chunks: list[bytes]) -> None:
    lines = LineSplitter()
    assert [line for chunk in chunks for line in lines.feed(chunk)] == ["30%"]


def test_a_long_line_is_cut_and_says_so() -> None:
    lines = LineSplitter()
    for _ in range(10):
        assert lines.feed(b"x" * 1000) == []
    (line,) = lines.feed(b"\n")
    assert line == "x" * LONGEST + f" … ({10_000 - LONGEST:,} bytes more)"


def test_bytes_that_are_no_text_do_not_stop_the_log() -> None:
    assert LineSplitter().feed(b"a\xff\xfeb\n") == ["a\ufffd\ufffdb"]


def test_the_check_runs_with_the_childs_environment() -> None:
    assert "AIRFLOW_HOME" not in LocalWorker().environment(os.environ)
