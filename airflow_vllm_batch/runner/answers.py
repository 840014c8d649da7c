"""What succeeded rows look like: finish reasons, empty answers, and answers that miss the form their row asked for.

Rows are only looked at, never altered.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from airflow_vllm_batch.contract import Answers

SCHEMAS_KEPT = 256


class _Message(msgspec.Struct):
    content: Any = None
    tool_calls: list[Any] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: _Message | None = None
    text: str | None = None


class _Part(msgspec.Struct):
    type: str | None = None
    text: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    content: list[_Part] | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Answer(msgspec.Struct):
    """A chat completion, a completion or a response; other shapes have none of these members."""

    choices: list[_Choice] | None = None
    output: list[_Item] | None = None
    status: str | None = None
    incomplete_details: _Incomplete | None = None


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str | None = None
    json_schema: _JsonSchema | None = None
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Asked(msgspec.Struct):
    response_format: _Format | None = None
    text: _Text | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_asked = msgspec.json.Decoder(_Asked).decode


class Form(NamedTuple):
    """The form that a row asked for."""

    schema: str | None
    """JSON text of its schema; null where any JSON will do."""


def may_ask_for_form(body: bytes) -> bool:
    """Whether a closer look at a request is worth it."""
    return b'"response_format"' in body or b'"format"' in body


def asked_form(body: bytes) -> Form | None:
    """Return the form that a request asks its answer to have; null where it may be any text.

    Chat and completions say it in ``response_format``, responses in ``text.format``.
    """
    if not may_ask_for_form(body):
        return None
    try:
        asked = _decode_asked(body)
    except msgspec.MsgspecError:
        return None
    wanted = asked.response_format or (asked.text.format if asked.text else None)
    if wanted is None or wanted.type not in {"json_object", "json_schema"}:
        return None
    schema = wanted.schema or (wanted.json_schema.schema if wanted.json_schema else None)
    if wanted.type == "json_object" or schema is None:
        return Form(None)
    return Form(json.dumps(schema, sort_keys=True))


@lru_cache(maxsize=SCHEMAS_KEPT)
def _fits(schema: str) -> Callable[[Any], bool]:
    """Return what tells whether a value fits a schema; one that is no schema excludes nothing."""
    # Most runs have no schema, and this import takes a tenth of a second.
    import jsonschema
    import referencing

    parsed = json.loads(schema)
    if not isinstance(parsed.get("$schema", ""), str):
        return lambda _: True
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except (jsonschema.exceptions.SchemaError, RecursionError):
        return lambda _: True
    # A registry of its own keeps the library from fetching what a $ref names: a row must not make us ask anybody.
    validator = kind(parsed, registry=referencing.Registry())

    def fits(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except (re.error, referencing.exceptions.Unresolvable, jsonschema.exceptions.UnknownType, RecursionError):
            return True

    return fits


@dataclass
class AnswerTally:
    """Counts the answers of one input, or of all."""

    finish_reasons: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    not_json: int = 0
    schema_mismatch: int = 0
    bad_rows: int = 0
    asked_json: bool = False
    asked_schema: bool = False

    def add(self, answer: bytes, form: Form | None) -> bool:
        """Count one succeeded row; returns whether its answer is a bad one.

        A row counts once, whatever number of choices it has: it is bad where one of them is.
        """
        try:
            parsed = _decode_answer(answer)
        except msgspec.MsgspecError:
            return False
        texts = self._texts(parsed)
        if texts is None:
            return False
        empty = any(text is not None and not text for text in texts)
        not_json = mismatch = False
        if form is not None:
            self.asked_json = True
            self.asked_schema |= form.schema is not None
            for text in texts:
                if not text:
                    continue
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError):
                    not_json = True
                    continue
                mismatch |= form.schema is not None and not _fits(form.schema)(value)
        self.empty += empty
        self.not_json += not_json
        self.schema_mismatch += mismatch
        bad = empty or not_json or mismatch
        self.bad_rows += bad
        return bad

    def _texts(self, answer: _Answer) -> list[str | None] | None:
        """Return the text of each choice and count its finish reason; null stands for tool calls, which have none."""
        if answer.choices is not None:
            for choice in answer.choices:
                self.finish_reasons[choice.finish_reason or "none"] += 1
            return [_choice_text(choice) for choice in answer.choices]
        if answer.output is not None:
            incomplete = answer.incomplete_details.reason if answer.incomplete_details else None
            self.finish_reasons[incomplete or answer.status or "none"] += 1
            if any(item.type not in {"message", "reasoning"} for item in answer.output):
                return [None]
            parts = [part.text or "" for item in answer.output for part in item.content or () if item.type == "message"]
            return ["".join(parts)]
        return None

    def document(self) -> Answers:
        return Answers(
            by_finish_reason=dict(self.finish_reasons),
            empty=self.empty,
            not_json=self.not_json if self.asked_json else None,
            schema_mismatch=self.schema_mismatch if self.asked_schema else None,
            bad_rows=self.bad_rows,
        )


def _choice_text(choice: _Choice) -> str | None:
    message = choice.message
    if message is None:
        return choice.text or ""
    if message.tool_calls:
        return None
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content if isinstance(part, dict))
    return str(message.content) if message.content else (message.refusal or "")
