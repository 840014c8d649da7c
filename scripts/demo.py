"""Carry a batch file from S3 through a real Airflow and real vLLM on this machine, and show what came out.

Starts an S3 server and Airflow's four services on loopback, runs the DAG of ``dags_examples/quickstart.py`` once,
and stops everything again. Ends with status 1 where the answers are not what they should be. Run it from the checkout
as a module: ``python -m scripts.demo``.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import obstore

from tests.support.airflow_stack import FINISHED, AirflowStack, Try
from tests.support.seaweed import SeaweedServer

CHECKOUT = Path(__file__).resolve().parent.parent
DAG_ID = "quickstart"
BUCKET = "quickstart"
CONNECTION = "aws_quickstart"
DAG_FILE = CHECKOUT / "dags_examples" / "quickstart.py"
INPUT = CHECKOUT / "dags_examples" / "data" / "quickstart.jsonl"
ENVIRONMENT = {
    "QUICKSTART_CONN_ID": CONNECTION,
    "QUICKSTART_FOLDER": f"s3://{BUCKET}",
    "QUICKSTART_MODEL": str(CHECKOUT / ".models" / "smollm2-135m-instruct"),
    "HF_HUB_OFFLINE": "1",
}
RUN_SECONDS = 900.0


class DemoError(Exception):
    """The demo did not show what it should; the message says what is missing."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    folder = CHECKOUT / ".demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tempfile.tempdir = str(folder)  # the S3 server keeps its objects in a temporary folder
    try:
        with SeaweedServer() as s3:
            upload_input(s3)
            say(f"S3 server at {s3.endpoint_url}, bucket {BUCKET}; booting Airflow")
            with airflow(folder / "airflow", s3) as stack:
                say(f"Airflow at {stack.url}")
                try:
                    printed = run(stack)
                finally:
                    ignore_signals()
                    keep_objects(s3, folder / "bucket")
                    say("stopping")
    except (DemoError, TimeoutError, RuntimeError) as error:
        raise SystemExit(f"demo: FAILED: {error}\ndemo: logs and objects are in {folder}") from None
    except KeyboardInterrupt:
        raise SystemExit("demo: interrupted, everything is stopped") from None
    say("every object of the bucket is kept in .demo/bucket; the task after the batch read from S3:")
    print(*printed, sep="\n", flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Stop in order at the first signal, and let no second one leave half of the processes behind."""
    ignore_signals()
    raise KeyboardInterrupt(signal.Signals(number).name)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def upload_input(s3: SeaweedServer) -> None:
    s3.create_bucket(BUCKET)
    obstore.put(s3.raw_store(BUCKET), INPUT.name, INPUT.read_bytes())


def aws_connection(s3: SeaweedServer) -> dict[str, Any]:
    """Return the members of an Airflow connection to the server."""
    return {
        "conn_type": "aws",
        "login": s3.access_key_id,
        "password": s3.secret_access_key,
        "extra": {"endpoint_url": s3.endpoint_url, "region_name": s3.region},
    }


def airflow(home: Path, s3: SeaweedServer) -> AirflowStack:
    return AirflowStack(home, DAG_FILE.parent, connections={CONNECTION: aws_connection(s3)}, environment=ENVIRONMENT)


def run(stack: AirflowStack) -> list[str]:
    """Run the DAG, follow the log of the batch, and return what the task after it printed."""
    started = time.monotonic()
    run_id = stack.trigger(DAG_ID)
    say(f"DAG run {run_id}")
    batch, show = Try(DAG_ID, run_id, "batch"), Try(DAG_ID, run_id, "show")
    state = follow(stack, batch)
    if state != "success":
        failed = [each for each in (batch, show) if stack.task(each)["state"] == "failed"]
        for each in failed:
            say(f"the end of the log of task {each.task_id}:")
            print(*stack.events(each)[-40:], sep="\n", flush=True)
        raise DemoError(f"the DAG run ended as {state}, failed tasks: {[each.task_id for each in failed]}")
    say(f"the DAG run took {time.monotonic() - started:.0f} s")
    printed = [str(record["event"]) for record in stack.log_records(show) if record.get("logger") == "task.stdout"]
    check(printed)
    return printed


def check(printed: list[str]) -> None:
    """Compare what was printed with what the input file must give."""
    text = "\n".join(printed)
    france = next((line for line in printed if line.lstrip().startswith("capital-of-france:")), "(no such line)")
    if "Paris" not in france:
        raise DemoError(f"the answer about the capital of France has no Paris in it: {france}")
    for wanted in ('"invalid": 1', "_tokens", "output.jsonl", "errors.jsonl", "manifest.json"):
        if wanted not in text:
            raise DemoError(f"the second task did not print {wanted}:\n{text}")


def follow(stack: AirflowStack, tried: Try) -> str:
    """Print the log of a task as it grows, and return the state in which its DAG run ends."""
    shown = 0
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        state = stack.run_state(tried.dag_id, tried.run_id)
        events = [event for event in stack.events(tried) if not event.startswith("::")]  # marks of foldable groups
        for event in events[shown:]:
            print(f"{tried.task_id} | {event}", flush=True)
        shown = max(shown, len(events))
        if state in FINISHED:
            return state
        if time.monotonic() > deadline:
            raise TimeoutError(f"the DAG run is still {state} after {RUN_SECONDS:.0f} s")
        time.sleep(1)


def keep_objects(s3: SeaweedServer, folder: Path) -> None:
    """Copy every object out of the bucket before its server goes."""
    store = s3.raw_store(BUCKET)
    for page in obstore.list(store):
        for item in page:
            target = folder / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(obstore.get(store, item["path"]).bytes())


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    main()
