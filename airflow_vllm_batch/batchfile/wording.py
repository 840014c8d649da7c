"""Text for people about values that came out of a file: short, printable, and never a prompt."""

from __future__ import annotations

import json
from typing import Any

MAX_ECHO = 200
"""Characters of a file's own text that a message may repeat."""
_MAX_NUMBER = 40


def printable(text: str, limit: int = MAX_ECHO) -> str:
    """Return text without control characters, cut to ``limit`` characters."""
    safe = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: limit + 1]
    )
    return safe if len(safe) <= limit else f"{safe[: limit - 1]}…"


def quote(text: str, limit: int = MAX_ECHO) -> str:
    """Return :func:`printable` text in double quotes."""
    escaped = printable(text, limit).replace('"', '\\"')
    return f'"{escaped}"'


def kind(value: Any) -> str:
    """Name a value's JSON type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def found(value: Any) -> str:
    """Say what a value is without repeating text: a number or literal itself, of anything else its type and size."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_NUMBER:
        return "an integer of very many digits"
    if isinstance(value, int | float):
        return repr(value)[:_MAX_NUMBER]
    if isinstance(value, str):
        return f"a string of {_count(len(value), 'character')}"
    if isinstance(value, list):
        return f"an array of {_count(len(value), 'item')}"
    return f"an object of {_count(len(value), 'member')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
