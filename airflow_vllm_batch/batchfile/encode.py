"""JSON text for lines of our own files: always one line, always UTF-8, whatever a model or a row said.

Readers that split text at Unicode line ends would cut a line at a raw U+2028, U+2029 or U+0085, so these leave as
escapes; the decoded text is the same.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()
_RAW = msgspec.json.Decoder(msgspec.Raw)
# In valid UTF-8 these bytes are nothing but the three characters, and in JSON they stand only inside strings.
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_NEWLINES_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


def encode(value: Any) -> bytes:
    """Return a JSON value as one line without its line end. Never fails on text or numbers.

    A lone surrogate becomes U+FFFD, a number that JSON can't hold null, an integer keeps every digit.
    ``msgspec.Raw`` inside is copied as it is: pass it through :func:`one_line` first.
    """
    try:
        text = _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):
        text = json.dumps(_cleaned(value), ensure_ascii=False, separators=(",", ":")).encode()
    return _without_separators(text)


def one_line(raw: bytes) -> bytes:
    """Return the JSON text of an engine's reply as one line, numbers and escapes as they are wherever possible.

    :raises ValueError: where it is not one JSON value.
    """
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError:
            raw = raw.decode(errors="replace").encode()
    try:
        _RAW.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return _reencoded(raw)
    # A line end inside a string would not have passed as JSON, so these stand between tokens.
    if b"\n" in raw or b"\r" in raw:
        raw = raw.translate(_NEWLINES_TO_SPACES).strip()
    return _without_separators(raw)


def _reencoded(raw: bytes) -> bytes:
    """Take what Python's more lenient reader takes: lone surrogates and NaN."""
    try:
        return encode(json.loads(raw))
    except RecursionError as error:
        raise ValueError("the reply is nested too deeply") from error
    except ValueError as error:
        raise ValueError("the reply is not one JSON value") from error


def _without_separators(text: bytes) -> bytes:
    if not text.isascii():
        for separator, escape in _SEPARATORS:
            text = text.replace(separator, escape)
    return text


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        # Both halves of a pair next to each other are one character after all.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return json.loads(bytes(value)) if isinstance(value, msgspec.Raw) else value
