"""The operator: arguments to a try of a batch. What a try does is decided in ``one_try``, not here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from airflow.sdk import BaseOperator
from airflow.sdk.log import mask_secret
from pydantic import JsonValue, ValidationError

from airflow_vllm_batch import config
from airflow_vllm_batch.arguments import Mode, Refusal, StageInput, adapters, engine_arguments, served_names
from airflow_vllm_batch.connections import BY_SCHEME
from airflow_vllm_batch.contract import BatchSpec, EngineSpec, ExitCode, ModelSpec, RowPolicy
from airflow_vllm_batch.contract.spec import Limits, check_threshold
from airflow_vllm_batch.exceptions import BatchStoppedError, VLLMBatchFailedError
from airflow_vllm_batch.judging import RunConf, places_of, read_run_conf, result_document
from airflow_vllm_batch.redaction import masked_url
from airflow_vllm_batch.run_key import run_key
from airflow_vllm_batch.storage.settings import StoreFile
from airflow_vllm_batch.workers.base import Worker
from airflow_vllm_batch.workers.local import LocalWorker

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

    from airflow_vllm_batch.one_try import OneTry
    from airflow_vllm_batch.reaching import Reached

_URI_FIELDS = ("input_uri", "output_uri", "state_uri")
EngineKind = Literal["vllm", "echo"]
BadLines = Literal["isolate", "strict"]
BadAnswers = Literal["count", "fail"]
UnknownParameters = Literal["error", "warn", "allow"]
Order = Literal["prefix", "input"]


class VLLMBatchOperator(BaseOperator):
    """Runs an OpenAI batch file on vLLM as one task.

    A try that follows another one, after a failure or a clear, runs only the rows without a result. The XCom has where
    answers, failed rows and manifest lie, and the counts; never rows.

    :param model: hub name, path or object-store URI (``s3://`` …) of the model. (templated)
    :param input_uri: the batch file (``s3://``, a path, ``http(s)://``; ``.gz`` and ``.zst`` too); with an http
        connection also a path below its base URL. (templated)
    :param output_uri: a folder that only this run uses, or one object for all rows: a name that ends in ``.jsonl``, an
        http(s) URL that takes a PUT. (templated)
    :param state_uri: of the one-object form: the folder of manifest.json and of what a retry needs. (templated)
    :param input_conn_id: connection that reads the input; None takes the credentials of the Airflow worker. By default
        the scheme's own one (``aws_default``, ``http_default`` …) where it exists. (templated)
    :param output_conn_id: connection that writes, likewise. (templated)
    :param model_conn_id: connection that reads a model and adapters in object storage, likewise. (templated)
    :param engine: ``vllm``, or ``echo``, which answers without a model, to try a DAG anywhere.
    :param engine_args: vLLM's arguments by name, such as ``{"max_model_len": 8192}``. (templated)
    :param served_model_names: what ``body.model`` of a row may say instead of ``model``. (templated)
    :param worker: where the runner runs; its fields are templated.
    :param bad_lines: ``isolate`` makes a bad line a failed row, ``strict`` refuses the file before an engine starts.
    :param unknown_parameters: what a body key that nobody knows is: an error, a warning, or nothing.
    :param allow_parameters: body keys that are admitted although they are unknown or refused by name.
    :param allowed_failures: how many rows may fail: an int is a number of rows, a float a share of them.
    :param bad_answers: ``fail`` counts an answer that is empty, or that misses the JSON or the schema which its row
        asked for, as a failed row; ``count`` only reports it. Rows are never altered.
    :param allowed_media_domains: the only hosts that rows may name media of; None admits every public one.
    :param run_anyway: start the engine even where bad lines alone are more than that.
    :param row_retries: how often a row is sent again within a try.
    :param row_timeout_seconds: how long one answer may take; None has no limit.
    :param max_in_flight: rows in the engine at once; None follows the engine.
    :param checkpoint_seconds: the most work that a killed runner loses.
    :param completion_window_seconds: how long the batch may take over all its tries; then rows without a result
        become ``expired``. A clear opens a fresh window; a retry does not.
    :param order: ``prefix`` sends rows with the same beginning together, ``input`` in the file's order. The output
        is in the file's order either way.
    :param limit: only the first so many rows, for a trial.
    :param seed: given to the engine.
    :param resume: False runs every row anew once per clear; a retry still goes on where the try before it stopped.
    :param overwrite: take over an output folder of another run.
    :param preflight: how much of the input is checked before the start: ``full``, ``sample``, ``off``.
    :param stage_input: ``auto`` copies an input that the worker can't read (a local file, a URL) into the run folder
        during the check, ``always`` every input, ``never`` none.
    :param poll_interval: seconds between two looks at the runner; by default ``[vllm_batch] poll_interval``.
    :param echo_delay_seconds: how long an answer of the ``echo`` engine takes.
    :param deferrable: whether to wait in the triggerer, which needs a worker that can; by default
        ``[vllm_batch] default_deferrable``.
    """

    template_fields: Sequence[str] = (
        "model",
        "input_uri",
        "output_uri",
        "state_uri",
        "input_conn_id",
        "output_conn_id",
        "model_conn_id",
        "engine_args",
        "served_model_names",
        "worker",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"engine_args": "json"}
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        model: str,
        input_uri: str,
        output_uri: str,
        state_uri: str | None = None,
        input_conn_id: str | None = BY_SCHEME,
        output_conn_id: str | None = BY_SCHEME,
        model_conn_id: str | None = BY_SCHEME,
        engine: EngineKind = "vllm",
        engine_args: Mapping[str, JsonValue] | None = None,
        served_model_names: str | Sequence[str] | None = None,
        worker: Worker | None = None,
        bad_lines: BadLines = "isolate",
        unknown_parameters: UnknownParameters = "error",
        allow_parameters: Sequence[str] = (),
        allowed_failures: int | float = 0,
        bad_answers: BadAnswers = "count",
        allowed_media_domains: Sequence[str] | None = None,
        run_anyway: bool = False,
        row_retries: int = 3,
        row_timeout_seconds: float | None = None,
        max_in_flight: int | None = None,
        checkpoint_seconds: float = 10.0,
        completion_window_seconds: float | None = None,
        order: Order = "prefix",
        limit: int | None = None,
        seed: int | None = None,
        resume: bool = True,
        overwrite: bool = False,
        preflight: Mode = "full",
        stage_input: StageInput = "auto",
        poll_interval: float | None = None,
        echo_delay_seconds: float = 0.0,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(multiple_outputs=True, **kwargs)
        self.model = model
        self.input_uri = input_uri
        self.output_uri = output_uri
        self.state_uri = state_uri
        self.input_conn_id = input_conn_id
        self.output_conn_id = output_conn_id
        self.model_conn_id = model_conn_id
        self.engine = engine
        self.engine_args = engine_args
        self.served_model_names = served_model_names
        # Templates are rendered in place: a worker that two operators share would keep the first one's values.
        self.worker = _checked_worker(worker).copy()
        self.bad_lines = bad_lines
        self.unknown_parameters = unknown_parameters
        self.allow_parameters = allow_parameters
        self.allowed_failures = allowed_failures
        self.bad_answers = bad_answers
        self.allowed_media_domains = allowed_media_domains
        self.run_anyway = run_anyway
        self.row_retries = row_retries
        self.row_timeout_seconds = row_timeout_seconds
        self.max_in_flight = max_in_flight
        self.checkpoint_seconds = checkpoint_seconds
        self.completion_window_seconds = completion_window_seconds
        self.order = order
        self.limit = limit
        self.seed = seed
        self.resume = resume
        self.overwrite = overwrite
        self.preflight = preflight
        self.stage_input = stage_input
        self.poll_interval = poll_interval
        self.echo_delay_seconds = echo_delay_seconds
        self.deferrable = deferrable
        self._full_urls: dict[str, str] = {}
        self._killed = False
        self._try: OneTry | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Check what is not templated, so that a wrong value is a DAG import error and not a failed night."""
        for name, value, values in (
            ("engine", self.engine, get_args(EngineKind)),
            ("bad_lines", self.bad_lines, get_args(BadLines)),
            ("unknown_parameters", self.unknown_parameters, get_args(UnknownParameters)),
            ("bad_answers", self.bad_answers, get_args(BadAnswers)),
            ("order", self.order, get_args(Order)),
            ("preflight", self.preflight, get_args(Mode)),
            ("stage_input", self.stage_input, get_args(StageInput)),
        ):
            if value not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {value!r}")
        check_threshold("allowed_failures", self.allowed_failures)
        if self.poll_interval is not None and not self.poll_interval > 0:
            raise ValueError(f"poll_interval must be a number of seconds above 0, got {self.poll_interval!r}")
        if self.deferrable and not self.worker.can_defer:
            raise ValueError(
                f"deferrable=True: a {type(self.worker).__name__} runs beside the task and ends with it, so the task "
                "can't wait in the triggerer; leave deferrable out"
            )
        try:
            self._policy(RunConf())
            self._limits()
            EngineSpec(kind=self.engine, delay_seconds=self.echo_delay_seconds)
        except ValidationError as error:
            raise ValueError(_faults(error)) from None

    # Templates

    def _do_render_template_fields(
        self,
        parent: Any,
        template_fields: Any,
        context: Context,
        jinja_env: jinja2.Environment,
        seen_oids: set[int],
    ) -> None:
        """Render, and mask signed URLs at once: Airflow stores the fields before ``execute``, for everybody to see.

        A mapped task calls this and not ``render_template_fields``.
        """
        super()._do_render_template_fields(parent, template_fields, context, jinja_env, seen_oids)
        if parent is not self:
            return
        for name in _URI_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str) and (shown := masked_url(value)) != value:
                self._full_urls[name] = value
                mask_secret(value.partition("?")[2] or value)
                setattr(self, name, shown)

    def _full(self, name: str) -> Any:
        return self._full_urls.get(name, getattr(self, name))

    # One try

    def execute(self, context: Context) -> dict[str, Any]:
        """Run a try and return its XCom, which has the same keys after a failure."""
        ti = context["ti"]
        key = run_key(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        self.log.info("run key %s", key)
        try:
            one_try = self._make_try(context, key)
        except Exception as error:
            shown = places_of(str(self.output_uri), str(self.state_uri or self.output_uri))
            document = result_document(key, None, None, shown)
            for name, value in {**document, "return_value": document}.items():
                self._publish(context, name, value)
            if isinstance(error, Refusal):
                raise VLLMBatchFailedError(str(error), exit_code=error.exit_code) from error
            if isinstance(error, ValueError):
                raise VLLMBatchFailedError(str(error), exit_code=ExitCode.USAGE) from error
            raise
        self._try = one_try
        if self._killed:  # while the try was being made
            one_try.stop()
        try:
            with asyncio.Runner() as runner:
                document = runner.run(one_try.run())
        finally:
            self._try = None
        if self._killed:
            # A task that was told to stop never succeeds: Airflow would believe it, see the manifest for the truth.
            raise BatchStoppedError("the task was told to stop in its last moment; a retry finds the batch done")
        return document

    def _make_try(self, context: Context, key: str) -> OneTry:
        # Clients of stores, which parsing a DAG file need not pay for.
        from airflow_vllm_batch.one_try import OneTry, Plan
        from airflow_vllm_batch.reaching import reach

        ti = context["ti"]
        dag_run = context.get("dag_run")
        conf = read_run_conf(getattr(dag_run, "conf", None))
        if self.deferrable is None and config.default_deferrable() and not self.worker.can_defer:
            self.log.info("deferrable is the configured default, but %s can't be left: waiting here", self.worker)
        reached = reach(
            input_uri=self._text("input_uri"),
            output_uri=self._text("output_uri"),
            state_uri=self._text("state_uri", optional=True) or None,
            input_conn_id=self.input_conn_id,
            output_conn_id=self.output_conn_id,
            weights=self._weights(),
            model_conn_id=self.model_conn_id,
        )
        owner = f"dag {ti.dag_id}, run {ti.run_id}, task {ti.task_id}"
        plan = Plan(
            spec=self._spec(key, reached, conf, context),
            worker=self.worker,
            epoch=getattr(ti, "max_tries", None) or 0,
            restart=conf.restart or not self.resume,
            overwrite=self.overwrite,
            preflight=self.preflight,
            stage_input=self.stage_input,
            poll_interval=self.poll_interval or config.poll_interval(),
            created_by=f"operator, {owner}" + (f", map index {ti.map_index}" if _is_mapped(ti.map_index) else ""),
            airflow_try=getattr(ti, "try_number", None),
        )
        return OneTry(
            plan,
            store=lambda: _masked(reached.store_file()),
            publish=lambda name, value: self._publish(context, name, value),
            emit=lambda line: self.log.info("%s", line),
        )

    def _weights(self) -> list[str]:
        if self.engine != "vllm":
            return []
        modules = engine_arguments(self.engine_args).get("lora_modules")
        return [self._text("model"), *(adapter.uri for adapter in adapters(modules))]

    def _spec(self, key: str, reached: Reached, conf: RunConf, context: Context) -> BatchSpec:
        """Build the spec, but for what the folder and the input's store have yet to say."""
        ti = context["ti"]
        args = engine_arguments(self.engine_args)
        if self.engine == "echo" and args:
            self.log.info("engine_args mean nothing to the echo engine and are left out")
            args = {}
        revision = args.get("revision")
        try:
            return BatchSpec(
                run_key=key,
                inputs=reached.inputs,
                output=reached.output,
                model=ModelSpec(
                    name=self._text("model"),
                    served_names=served_names(self.served_model_names),
                    adapters=adapters(args.get("lora_modules")),
                    revision=str(revision) if revision is not None else None,
                ),
                engine=EngineSpec(
                    kind=self.engine,
                    args=args,
                    delay_seconds=self.echo_delay_seconds if self.engine == "echo" else 0.0,
                ),
                policy=self._policy(conf),
                limits=self._limits(),
                seed=self.seed,
                labels={
                    "dag_id": ti.dag_id,
                    "run_id": ti.run_id,
                    "task_id": ti.task_id,
                    **({"map_index": str(ti.map_index)} if _is_mapped(ti.map_index) else {}),
                },
            )
        except ValidationError as error:
            raise Refusal(ExitCode.USAGE, _faults(error)) from None

    def _policy(self, conf: RunConf) -> RowPolicy:
        return RowPolicy(
            bad_lines=self.bad_lines,
            unknown_parameters=self.unknown_parameters,
            allow_parameters=tuple(self.allow_parameters),
            allowed_failures=self.allowed_failures if conf.allowed_failures is None else conf.allowed_failures,
            run_anyway=self.run_anyway,
            bad_answers=self.bad_answers,
            allowed_media_domains=(
                tuple(self.allowed_media_domains) if self.allowed_media_domains is not None else None
            ),
        )

    def _limits(self) -> Limits:
        return Limits(
            row_retries=self.row_retries,
            row_timeout_seconds=self.row_timeout_seconds,
            max_in_flight=self.max_in_flight,
            order=self.order,
            checkpoint_seconds=self.checkpoint_seconds,
            completion_window_seconds=self.completion_window_seconds,
            limit=self.limit,
        )

    def _text(self, name: str, *, optional: bool = False) -> str:
        value = self._full(name)
        if value is None and optional:
            return ""
        if not isinstance(value, str) or not value.strip():
            raise Refusal(ExitCode.USAGE, f"{name} must be text that is not empty once rendered, got {value!r}")
        return value

    def _publish(self, context: Context, key: str, value: Any) -> None:
        """Push an XCom. A batch does not fail because one could not be pushed, nor is its own failure hidden so."""
        if not self.do_xcom_push:
            return
        try:
            context["ti"].xcom_push(key=key, value=value)
        except Exception as error:  # noqa: BLE001  whatever the API server says: it is a report, not a result
            self.log.warning("XCom %s can't be pushed (%s: %s)", key, type(error).__name__, error)

    def on_kill(self) -> None:
        """Stop the runner and let ``execute`` raise.

        Runs in a signal handler of the main thread: no question to Airflow and no lock, which the interrupted code
        may hold. After it ``execute`` never returns, or a drained worker would make the task a success.
        """
        self._killed = True
        if self._try is not None:
            self._try.stop()


def _checked_worker(worker: object) -> Worker:
    if worker is None:
        return LocalWorker()
    if not isinstance(worker, LocalWorker) and not callable(getattr(worker, "start", None)):
        raise ValueError(f"worker must be a worker such as LocalWorker(), got {worker!r}")
    return worker  # type: ignore[return-value]


def _is_mapped(map_index: int | None) -> bool:
    return map_index is not None and map_index >= 0


def _masked(store: StoreFile) -> StoreFile:
    for secret in store.secrets():
        mask_secret(secret)
    return store


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)
    )
