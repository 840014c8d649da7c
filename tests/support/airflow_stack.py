"""A real Airflow on loopback: API server, scheduler, DAG processor and triggerer, each a process of its own.

The tests start one for a whole session, the demo one for a single DAG run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.waiting import wait_until

SERVICES = ("api-server", "dag-processor", "scheduler", "triggerer")
BOOT_SECONDS = 240.0
STOP_SECONDS = 15.0
FINISHED = frozenset({"success", "failed"})


@dataclass(frozen=True)
class Answer:
    """What the API server said: the status and the parsed body."""

    status: int
    body: Any


@dataclass(frozen=True)
class Try:
    """One try of one task in one DAG run."""

    dag_id: str
    run_id: str
    task_id: str
    number: int = 1
    map_index: int = -1

    @property
    def path(self) -> str:
        return f"/api/v2/dags/{quote(self.dag_id)}/dagRuns/{quote(self.run_id)}/taskInstances/{quote(self.task_id)}"


class AirflowStack:
    """Start on entering, stop on leaving; in between, a thin client of the public REST API.

    :param home: AIRFLOW_HOME, made where it is absent; database and logs stay in it.
    :param dags: the folder of DAG files.
    :param connections: connection id to the members of a connection, given to every service as an environment
        variable, so that the database holds no secret.
    :param environment: further variables of every service, and so of every task.
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        *,
        connections: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.url = ""
        self._dags = dags
        self._connections = connections or {}
        self._environment = environment or {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = ""

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        api, worker_log, trigger_log = _free_ports(3)
        self.url = f"http://127.0.0.1:{api}"
        environment = self._service_environment(api, worker_log, trigger_log)
        try:
            self._migrate(environment)
            for service in SERVICES:
                self._start(service, environment)
            wait_until(self._healthy, seconds=BOOT_SECONDS, what="every service of Airflow to be healthy")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the services and every process below them, also those that tasks started in sessions of their own."""
        running = {name: process for name, process in self._processes.items() if process.poll() is None}
        below: list[psutil.Process] = []
        for process in running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                below += psutil.Process(process.pid).children(recursive=True)
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        _, stubborn = psutil.wait_procs(below, timeout=STOP_SECONDS)
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for orphan in stubborn:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()  # psutil compares start times, so this is never a later process with the same id
        self._processes.clear()

    # --- what a test asks ---------------------------------------------------------------------------------------

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> str:
        """Start a run of a DAG, as soon as the DAG processor has read its file, and return its id."""
        wait_until(lambda: self._is_parsed(dag_id), seconds=120, what=f"the DAG {dag_id} to be parsed")
        wanted = {"logical_date": None, "conf": dict(conf or {}), **({"dag_run_id": run_id} if run_id else {})}
        return str(self._call("POST", f"/api/v2/dags/{quote(dag_id)}/dagRuns", wanted)["dag_run_id"])

    def run(self, dag_id: str, conf: Mapping[str, Any] | None = None, *, seconds: float = 180.0) -> tuple[str, str]:
        """Start a run, wait for its end, and return its id and its state."""
        run_id = self.trigger(dag_id, conf)
        return run_id, self.wait_for_run(dag_id, run_id, seconds=seconds)

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self._call("GET", f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}")["state"])

    def wait_for_run(self, dag_id: str, run_id: str, *, seconds: float = 180.0) -> str:
        """Return ``success`` or ``failed``."""

        def finished() -> str | None:
            state = self.run_state(dag_id, run_id)
            return state if state in FINISHED else None

        return wait_until(finished, seconds=seconds, what=f"the run {run_id} of {dag_id} to end")

    def task(self, tried: Try) -> dict[str, Any]:
        """Return the task instance as the API shows it: state, try_number, rendered_fields and more."""
        return dict(self._call("GET", tried.path if tried.map_index < 0 else f"{tried.path}/{tried.map_index}"))

    def xcom(self, tried: Try, key: str = "return_value") -> Any:
        """Return an XCom's value; null where the task pushed none under the key."""
        query = urllib.parse.urlencode({"map_index": tried.map_index, "deserialize": "true"})
        answer = self.ask("GET", f"{tried.path}/xcomEntries/{quote(key)}?{query}")
        if answer.status == 404:
            return None
        return _checked(answer, f"the XCom {key} of {tried}")["value"]

    def xcom_keys(self, tried: Try) -> set[str]:
        query = urllib.parse.urlencode({"map_index": tried.map_index, "limit": 100})
        entries = self._call("GET", f"{tried.path}/xcomEntries?{query}")["xcom_entries"]
        return {str(entry["key"]) for entry in entries}

    def log_records(self, tried: Try) -> list[dict[str, Any]]:
        """Return the structured records of a try's log, so far as there are any."""
        query = urllib.parse.urlencode({"map_index": tried.map_index, "full_content": "true"})
        answer = self.ask("GET", f"{tried.path}/logs/{tried.number}?{query}")
        if answer.status == 404:
            return []
        content = _checked(answer, f"the log of {tried}")["content"]
        return [record if isinstance(record, dict) else {"event": record} for record in content]

    def log(self, tried: Try) -> str:
        """Return a try's log as text: every member of every record, one record a line."""
        return "\n".join(json.dumps(record, ensure_ascii=False, default=str) for record in self.log_records(tried))

    def events(self, tried: Try) -> list[str]:
        """Return what a reader of the log sees: the messages, each with the exceptions that belong to it."""
        return [_shown(record) for record in self.log_records(tried)]

    def clear(self, tried: Try) -> None:
        """Clear one task of a finished run, so that it runs again."""
        self._call(
            "POST",
            f"/api/v2/dags/{quote(tried.dag_id)}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": tried.run_id,
                "task_ids": [tried.task_id],
                "only_failed": False,
                "reset_dag_runs": True,
            },
        )

    def files_holding(self, text: str) -> list[Path]:
        """Return the files of AIRFLOW_HOME, the database and every log included, that have the text in them."""
        wanted = text.encode()
        return [path for path in sorted(self.home.rglob("*")) if path.is_file() and wanted in path.read_bytes()]

    def service_log_tails(self, characters: int = 2000) -> Iterator[tuple[str, str]]:
        """Yield the name and the end of the log of each service, for a message about what went wrong."""
        for service in ("db-migrate", *SERVICES):
            log = self._service_log(service)
            if log.exists():
                yield service, log.read_text(errors="replace")[-characters:]

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Make one request as an admin. A refusal is a status in the answer.

        :raises OSError: where the API server can't be reached.
        """
        headers = {"Accept": "application/json"}
        if not path.startswith(("/auth/", "/api/v2/monitor/")):
            self._token = self._token or str(self._call("GET", "/auth/token")["access_token"])
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return Answer(response.status, _parsed(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _parsed(error.read()))

    # --- how it is started --------------------------------------------------------------------------------------

    def _service_environment(self, api: int, worker_log: int, trigger_log: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW_", "PYTEST_"))}
        url = f"http://localhost:{api}"
        return {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "NO_PROXY": "localhost,127.0.0.1",
            "no_proxy": "localhost,127.0.0.1",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self._dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(api),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(32),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_log),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_log),
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            # Files of a session don't change, and reading them again every few seconds doubles the load.
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "300",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(dict(it)) for name, it in self._connections.items()},
            **self._environment,
        }

    def _migrate(self, environment: Mapping[str, str]) -> None:
        log = self._service_log("db-migrate")
        with log.open("wb") as stream:
            # In the table of processes as well: a Ctrl-C while it runs must not leave it behind.
            process = self._processes["db-migrate"] = subprocess.Popen(
                [sys.executable, "-m", "airflow", "db", "migrate"],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            status = process.wait(timeout=BOOT_SECONDS)
        del self._processes["db-migrate"]
        if status:
            raise RuntimeError(f"airflow db migrate ended with {status}: {log.read_text(errors='replace')[-2000:]}")

    def _start(self, service: str, environment: Mapping[str, str]) -> None:
        with self._service_log(service).open("wb") as stream:
            self._processes[service] = subprocess.Popen(
                [sys.executable, "-m", "airflow", service],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    def _service_log(self, service: str) -> Path:
        return self.home / f"{service}.log"

    def _healthy(self) -> bool:
        for service, process in self._processes.items():
            if process.poll() is not None:
                tail = self._service_log(service).read_text(errors="replace")[-2000:]
                raise RuntimeError(f"airflow {service} ended with {process.returncode}: {tail}")
        try:
            answer = self.ask("GET", "/api/v2/monitor/health")
        except OSError:
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return answer.status == 200 and all(answer.body[part]["status"] == "healthy" for part in parts)

    def _is_parsed(self, dag_id: str) -> bool:
        if self.ask("GET", f"/api/v2/dags/{quote(dag_id)}").status == 200:
            return True
        for error in self._call("GET", "/api/v2/importErrors")["import_errors"]:
            if Path(error["filename"]).stem == dag_id:
                raise RuntimeError(f"{error['filename']} can't be imported: {error['stack_trace']}")
        return False

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return _checked(self.ask(method, path, body), f"{method} {path}")


def quote(part: str) -> str:
    return urllib.parse.quote(part, safe="")


def _shown(record: Mapping[str, Any]) -> str:
    causes = [f"{cause['exc_type']}: {cause['exc_value']}" for cause in record.get("error_detail") or ()]
    return "\n".join((str(record.get("event", "")), *causes))


def _checked(answer: Answer, asked: str) -> Any:
    if answer.status >= 400:
        raise RuntimeError(f"Airflow answered {answer.status} to {asked}: {answer.body}")
    return answer.body


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
