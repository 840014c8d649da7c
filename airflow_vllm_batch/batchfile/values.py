"""Rules about single parameter values: types as vLLM's models take them, and ranges. One checker a kind of value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from airflow_vllm_batch.batchfile.rows import Fault
from airflow_vllm_batch.batchfile.wording import found, kind, quote
from airflow_vllm_batch.contract import ErrorCode

ValueCheck: TypeAlias = Callable[[Any, str], Fault | None]
"""From a value that is not null and its field to a fault."""

ENCODING_FORMATS = ("float", "base64", "bytes", "bytes_only")
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SHOWN_TEXT = 40


def invalid(field: str, reason: str) -> Fault:
    return Fault(ErrorCode.INVALID_REQUEST, field, f"{field} {reason}")


def _number(value: Any) -> int | float | None:
    """Return a value as a number; text that spells one counts, as vLLM reads it. None where it is none."""
    which = type(value)
    if which is int or which is float:
        return value  # type: ignore[no-any-return]
    if which is str and len(value) <= _SHOWN_TEXT:
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _shown(value: Any) -> str:
    return quote(value) if type(value) is str and len(value) <= _SHOWN_TEXT else found(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """A check of a number in a range; ``whole`` takes 256.0 as well as 256."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    whole: bool = False

    def __call__(self, value: Any, field: str) -> Fault | None:
        given = _number(value)
        noun = "a whole number" if self.whole else "a number"
        # The comparison with itself refuses NaN, which text can spell.
        if given is None or given != given or (self.whole and given != given // 1):
            return invalid(field, f"must be {noun}, found {_shown(value)}")
        if self.above is not None and given <= self.above:
            return invalid(field, f"must be above {self.above}, found {_shown(value)}")
        if self.minimum is not None and given < self.minimum:
            return invalid(field, f"must be at least {self.minimum}, found {_shown(value)}")
        if self.maximum is not None and given > self.maximum:
            return invalid(field, f"must be at most {self.maximum}, found {_shown(value)}")
        return None


def prompt_logprobs(value: Any, field: str) -> Fault | None:
    if _number(value) == -1:
        return invalid(field, "must not be -1: one entry for each token and word of the vocabulary fills the memory")
    return NumberRange(minimum=0, whole=True)(value, field)


def stop(value: Any, field: str) -> Fault | None:
    if type(value) is str:
        return None if value else invalid(field, "must not be an empty string")
    return texts(value, field)


def texts(value: Any, field: str) -> Fault | None:
    """Check a list of strings that are not empty."""
    if type(value) is not list:
        return invalid(field, f"must be an array of strings, got {kind(value)}")
    for index, item in enumerate(value):
        if type(item) is not str:
            return invalid(field, f"must hold strings only, item {index} is {kind(item)}")
        if not item:
            return invalid(field, f"must not hold an empty string, item {index} is one")
    return None


def token_ids(value: Any, field: str) -> Fault | None:
    if type(value) is not list:
        return invalid(field, f"must be an array of token ids, got {kind(value)}")
    # The whole list in two passes of the interpreter's own: a list may hold a hundred thousand ids.
    if value and not {type(item) for item in value} <= {int}:
        index, item = next((index, item) for index, item in enumerate(value) if type(item) is not int)
        return invalid(field, f"mixes types: item {index} is {kind(item)}, token ids are whole numbers")
    if value and min(value) < 0:
        return invalid(field, f"holds a negative token id, {found(min(value))}")
    return None


def texts_or_token_ids(value: Any, field: str) -> Fault | None:
    """Check a prompt or an input: a text, a list of texts, a list of token ids, or a list of such lists."""
    if type(value) is str:
        return None if value else invalid(field, "is empty")
    if type(value) is not list:
        return invalid(field, f"must be a string or an array, got {kind(value)}")
    if not value:
        return invalid(field, "is empty")
    first = type(value[0])
    if first is int:
        return token_ids(value, field)
    if first is not str and first is not list:
        return invalid(f"{field}[0]", f"must be a string, a token id or an array of token ids, got {kind(value[0])}")
    for index, item in enumerate(value):
        if type(item) is not first:
            return invalid(field, f"mixes types: item 0 is {kind(value[0])}, item {index} is {kind(item)}")
        if not item:
            return invalid(f"{field}[{index}]", "is empty")
        fault = token_ids(item, f"{field}[{index}]") if first is list else None
        if fault:
            return fault
    return None


def logit_bias(value: Any, field: str) -> Fault | None:
    if type(value) is not dict:
        return invalid(field, f"must be an object of token ids and numbers, got {kind(value)}")
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit()):
            return invalid(field, f"must have token ids as names, found {quote(name, _SHOWN_TEXT)}")
        if _number(bias) is None:
            return invalid(field, f"must have numbers as values, token {name[:_SHOWN_TEXT]} has {kind(bias)}")
    return None


def response_format(value: Any, field: str) -> Fault | None:
    if type(value) is not dict:
        return invalid(field, f"must be an object, got {kind(value)}")
    which = value.get("type")
    if type(which) is not str or which not in RESPONSE_FORMATS:
        shown = quote(which, _SHOWN_TEXT) if type(which) is str else kind(which)
        return invalid(f"{field}.type", f"must be one of {', '.join(RESPONSE_FORMATS)}, found {shown}")
    if which != "json_schema":
        return None
    wanted = value.get("json_schema")
    if type(wanted) is not dict:
        reason = "is required" if wanted is None else f"must be an object, got {kind(wanted)}"
        return invalid(f"{field}.json_schema", reason)
    schema = wanted.get("schema")
    if schema is not None and type(schema) is not dict:
        hint = " (encoded twice?)" if type(schema) is str else ""
        return invalid(f"{field}.json_schema.schema", f"must be an object, got {kind(schema)}{hint}")
    return None


def structured_outputs(value: Any, field: str) -> Fault | None:
    if type(value) is not dict:
        return invalid(field, f"must be an object, got {kind(value)}")
    given = [name for name in STRUCTURED_OUTPUTS if value.get(name) is not None]
    if len(given) > 1:
        return invalid(field, f"must have one constraint only, found {' and '.join(given)}")
    choice = value.get("choice")
    if choice is not None:
        if choice == []:
            return invalid(f"{field}.choice", "is empty")
        return texts(choice, f"{field}.choice")
    return None


def encoding_format(value: Any, field: str) -> Fault | None:
    if type(value) is str and value in ENCODING_FORMATS:
        return None
    return invalid(field, f"must be one of {', '.join(ENCODING_FORMATS)}, found {_shown(value)}")


def chat_tools(value: Any, field: str) -> Fault | None:
    if type(value) is not list:
        return invalid(field, f"must be an array, got {kind(value)}")
    for index, tool in enumerate(value):
        where = f"{field}[{index}]"
        if type(tool) is not dict:
            return invalid(where, f"must be an object, got {kind(tool)}")
        function = tool.get("function")
        if type(function) is not dict:
            reason = "is required" if function is None else f"must be an object, got {kind(function)}"
            return invalid(f"{where}.function", reason)
        name = function.get("name")
        if type(name) is not str or not name:
            reason = "is required" if name is None or name == "" else f"must be a string, got {kind(name)}"
            return invalid(f"{where}.function.name", reason)
    return None


def chat_tool_choice_fault(body: Mapping[str, Any]) -> Fault | None:
    """Check tool_choice against tools, which :func:`chat_tools` has passed."""
    choice, field = body.get("tool_choice"), "body.tool_choice"
    if choice is None or choice == "none":
        return None
    tools = body.get("tools")
    if not tools:
        return invalid(field, "needs tools, and body.tools is empty or absent")
    if type(choice) is str:
        if choice in {"auto", "required"}:
            return None
        return invalid(field, f"must be none, auto, required or an object, found {quote(choice, _SHOWN_TEXT)}")
    function = choice.get("function")
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        return invalid(f"{field}.function.name", "is required")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        return invalid(field, f"names no tool in body.tools, found {quote(name, _SHOWN_TEXT)}")
    return None


@dataclass(frozen=True, slots=True)
class JsonType:
    """A check of a value's JSON type, as lax as vLLM's models are about numbers and booleans."""

    types: frozenset[str]

    def __call__(self, value: Any, field: str) -> Fault | None:
        if any(isinstance(value, _CLASSES[name]) for name in self.types if name in _CLASSES):
            return None
        if self.types & _NUMERIC and _number(value) is not None:
            return None
        if "boolean" in self.types and (value in (0, 1) or (type(value) is str and value.lower() in _BOOLEAN_TEXT)):
            return None
        wanted = " or ".join(_ARTICLES[name] for name in sorted(self.types))
        return invalid(field, f"must be {wanted}, got {kind(value)}")


def json_type(parameter: Mapping[str, Any]) -> ValueCheck | None:
    """Return the check for a parameter of the generated table, None where it admits anything."""
    types = frozenset(parameter.get("types", ())) - {"null"}
    if types and types <= _NUMERIC:
        whole = "number" not in types
        return NumberRange(minimum=parameter.get("minimum"), maximum=parameter.get("maximum"), whole=whole)
    return JsonType(types) if types else None


_NUMERIC = frozenset({"integer", "number"})
_CLASSES: dict[str, type] = {"array": list, "boolean": bool, "object": dict, "string": str}
_ARTICLES = {
    "array": "an array",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}
# What pydantic takes for a boolean in vLLM's models.
_BOOLEAN_TEXT = frozenset({"true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0"})
