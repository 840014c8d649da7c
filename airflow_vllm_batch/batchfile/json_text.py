"""One line's bytes to one JSON value under RFC 8259, or the fault with its place in the line."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import jiter

from airflow_vllm_batch.batchfile.rows import Fault
from airflow_vllm_batch.batchfile.wording import kind, printable
from airflow_vllm_batch.contract import ErrorCode

MAX_DEPTH = 200
_MAX_PATH = 120
_MAX_STEPS = 10
_Path: TypeAlias = list[str | int | None]
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
_PLACE = re.compile(r" at line (\d+) column (\d+)$")
_LITERAL = re.compile(rb"-?(?:NaN|Infinity|inf|nan)\b")
_PYTHON_LITERAL = re.compile(rb"(?:None|True|False)\b")


class JsonFaultError(Exception):
    """A line is not one strict JSON value."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def parse(raw: bytes, *, skipped: int = 0) -> Any:
    """Return the line's JSON value; integers are exact.

    Refused beside syntax errors: invalid UTF-8, duplicate member names at any depth, lone surrogates, numbers that
    overflow a double, integers of more than 4,300 digits, nesting deeper than 200.

    :param skipped: bytes of the line before ``raw``.
    :raises JsonFaultError: with the fault; its message names the byte in the line, counted from 1.
    """
    try:
        value = jiter.from_json(raw, catch_duplicate_keys=True, allow_inf_nan=False)
    except ValueError as error:
        _explain(raw, str(error), skipped)
    if type(value) is dict or type(value) is list:
        path = _beyond_bounds(value, 1)
        if path is not None:
            raise JsonFaultError(_bounds_fault(value, path))
    return value


def _beyond_bounds(value: Any, depth: int) -> tuple[str | int, ...] | None:
    """Return the path to the first number that is infinite or container that is too deep, None where all is well.

    jiter reads an overflowing number as infinity, and counts the levels in another way.
    """
    if depth > MAX_DEPTH:
        return ()
    if type(value) is dict:
        members: Any = value.items()
    elif len(value) > 8 and not {float, dict, list}.intersection(map(type, value)):
        return None
    else:
        members = enumerate(value)
    for name, member in members:
        which = type(member)
        if which is str or which is int:
            continue
        if which is float:
            if math.isinf(member):
                return (name,)
        elif which is dict or which is list:
            below = _beyond_bounds(member, depth + 1)
            if below is not None:
                return (name, *below)
    return None


def _bounds_fault(value: Any, path: tuple[str | int, ...]) -> Fault:
    for step in path:
        value = value[step]
    where = _join(list(path))
    if isinstance(value, float):
        return Fault(ErrorCode.INVALID_JSON, where, f"{where} is a number that no double can hold")
    return Fault(ErrorCode.INVALID_JSON, where, f"{where} is nested more than {MAX_DEPTH} levels deep")


def _explain(raw: bytes, problem: str, skipped: int) -> NoReturn:
    """Raise the fault for what jiter refused, in words of our own where they say more."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise JsonFaultError(_encoding_fault(raw, error, skipped)) from None
    place = _PLACE.search(problem)
    reason = problem[: place.start()] if place else problem
    # jiter counts from 1, and says 0 for the end of an empty text.
    offset = max(int(place[2]) - 1, 0) if place and place[1] == "1" else 0
    field = path_at(raw, offset)
    reason = _in_our_words(raw, offset, reason)
    at = f" in {field}" if field else ""
    message = f"not valid JSON at byte {skipped + offset + 1:,}{at}: {reason}"
    raise JsonFaultError(Fault(ErrorCode.INVALID_JSON, field, message)) from None


def _encoding_fault(raw: bytes, error: UnicodeDecodeError, skipped: int) -> Fault:
    field = path_at(raw, error.start)
    at = f" in {field}" if field else ""
    message = (
        f"not valid UTF-8 at byte {skipped + error.start + 1:,}{at}: 0x{raw[error.start]:02X} ({error.reason}); "
        "save the file as UTF-8"
    )
    return Fault(ErrorCode.INVALID_ENCODING, field, message)


def _in_our_words(raw: bytes, offset: int, reason: str) -> str:
    here = raw[offset : offset + 12]
    if literal := _LITERAL.match(raw, max(offset - 1, 0)) or _LITERAL.match(raw, offset):
        return f"{literal[0].decode()} is not JSON; use a finite number or null"
    if literal := _PYTHON_LITERAL.match(raw, offset):
        return f"{literal[0].decode()} is Python, not JSON"
    if reason.startswith("Detected duplicate key"):
        return "this member appears twice"
    if "surrogate" in reason or "hex escape" in reason:
        return "a lone surrogate escape, half of a character"
    if reason.startswith("recursion limit"):
        return f"nested more than {MAX_DEPTH} levels deep"
    if reason.startswith("number out of range"):
        return "an integer of more than 4,300 digits"
    if reason.startswith("control character"):
        code = raw[offset - 1] if offset and raw[offset - 1] < 0x20 else here[0] if here else 0
        return f"a raw control character 0x{code:02X} inside a string; write it as \\u{code:04x}"
    if reason.startswith("EOF") and raw.strip(b" \t\r") != b"[":
        return f"the line ends too early ({reason}); the file may be truncated"
    return _by_the_look_of(raw, here, reason)


def _by_the_look_of(raw: bytes, here: bytes, reason: str) -> str:
    """Name the usual causes of a line that is no JSON at all."""
    start = raw.lstrip(b" \t\r")
    if reason.startswith("trailing characters"):
        if start.startswith(b'"{""'):
            return "the request is quoted as in a CSV file"
        if b"{" in here:
            return "more than one JSON value on the line; a line feed may be missing"
        return "text after the request, such as a comma; one object a line is needed"
    if start.startswith(b"<"):
        return "this looks like HTML or XML"
    if start.startswith((b"#", b"//", b"/*")):
        return "a comment; JSON has none"
    if start in {b"[", b"]", b"],"}:
        return "this looks like a JSON array over several lines; one object a line is needed"
    if start.startswith(b"\0"):
        return "a NUL byte; the file may have been written only in part"
    if here.startswith((b"'", "“".encode(), "”".encode(), "‘".encode())):
        return "single or typographic quotes; JSON strings stand in double quotes"
    return reason


def path_at(raw: bytes, offset: int) -> str | None:
    """Return the path of the member that is being read at an offset, such as ``body.stop[0]``; None at the top."""
    last = deque(_walk(raw, offset), maxlen=1)
    return _join([step for step in last[0][1] if step is not None]) or None if last else None


def _walk(raw: bytes, end: int) -> Iterator[tuple[bytes | None, _Path]]:
    """Yield the path after each token of what may be no JSON, with the string that is a value there, else None.

    The path is one list that changes: a name or an index for each open container, None before a member's name.
    """
    path: _Path = []
    name_next = False
    for match in _TOKEN.finditer(raw, 0, max(end, 0)):
        token = match[0]
        value = None
        if token == b"{":
            path.append(None)
            name_next = True
        elif token == b"[":
            path.append(0)
            name_next = False
        elif token in b"]}":
            if path:
                path.pop()
            name_next = False
        elif token == b",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            elif path:
                path[-1] = None
                name_next = True
        elif name_next:
            path[-1] = _text(token)
            name_next = False
        else:
            value = token
        yield value, path


def _text(token: bytes) -> str:
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        return token[1:-1].decode(errors="replace")


def _join(path: list[str | int]) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{printable(step, _MAX_PATH)}" for step in path[:_MAX_STEPS]]
    return "".join(steps).removeprefix(".") + ("…" if len(path) > _MAX_STEPS else "")


def custom_id_of_broken(raw: bytes) -> str | None:
    """Return the custom_id of a line that :func:`parse` refused, where a lenient reader still finds exactly one.

    That is a line which only breaks a rule of strictness: NaN, a duplicate member elsewhere, wrong bytes, too many
    levels. A line that no reader takes for one object carries no id: the whole of it may stand on the next line.
    """
    found: list[str] = []

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        # The outermost object is closed last, so the last word is its own.
        found[:] = [value for name, value in members if name == "custom_id"]
        return {}

    try:
        if type(json.loads(raw.decode(errors="replace"), strict=False, object_pairs_hook=pairs)) is not dict:
            return None
    except RecursionError:
        found = _custom_ids_of_deep(raw)
    except ValueError:
        return None
    return found[0] if len(found) == 1 and is_usable_id(found[0]) and "\ufffd" not in found[0] else None


def _custom_ids_of_deep(raw: bytes) -> list[str]:
    """Find the values of custom_id without recursion; none where the brackets don't close."""
    found = []
    path: _Path = [None]
    for value, path in _walk(raw, len(raw)):
        if value is not None and path == ["custom_id"]:
            found.append(_text(value))
    return found if not path else []


def is_usable_id(value: Any) -> bool:
    """Whether a value can serve as custom_id: a string that is not blank and that UTF-8 can hold."""
    if type(value) is not str or not value.strip():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong_type(value: Any) -> str:
    """Say what stands where an object should, with a hint where it was encoded twice."""
    hint = " (encoded twice?)" if type(value) is str and value.lstrip().startswith("{") else ""
    return f"expected an object, got {kind(value)}{hint}"
