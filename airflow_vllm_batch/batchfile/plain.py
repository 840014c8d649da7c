"""A short cut for plain rows: what is nearly every line of a large file is checked in one typed decode.

The types are derived from the same checks that :mod:`body` makes, so the short cut knows no rule of its own. It
accepts a line only where every other rule would pass it too, and says nothing about the rest: those lines take the
long way, which also finds the words for a fault.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

import msgspec

from airflow_vllm_batch.batchfile.body import Endpoint
from airflow_vllm_batch.batchfile.rows import Row
from airflow_vllm_batch.batchfile.values import JsonType, NumberRange, ValueCheck


class _Body(msgspec.Struct, gc=False):
    body: msgspec.Raw


_RAW_BODY = msgspec.json.Decoder(_Body)
_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class _Message(TypedDict):
    role: str
    content: str


_PROMPTS: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("messages", Annotated[list[_Message], msgspec.Meta(min_length=1)]),
    "/v1/completions": ("prompt", _NonEmpty),
    "/v1/embeddings": ("input", _NonEmpty),
}
# Bytes are looked for by number: for a bytes object, each search makes an exception first.
_BACKSLASH, _MARK, _BRACE = b'\\"{'
_ENVELOPE_MARKS = 2 * (4 + 3)
"""Quotation marks of four names and three strings."""


class PlainReader:
    """Reads rows of one endpoint that hold texts, numbers, booleans and nulls only."""

    def __init__(self, endpoint: Endpoint, served_names: frozenset[str] | None) -> None:
        self._url = endpoint.url
        self._served_names = served_names
        self._prompt, prompt_type = _PROMPTS[endpoint.url]
        members: dict[str, Any] = {name: _type_of(check) for name, check in endpoint.checks.items()}
        members = {name: type_ for name, type_ in members.items() if type_ is not None}
        members |= {"model": str | None, "stream": Literal[None], self._prompt: prompt_type}
        whole = endpoint.whole
        self._whole = whole.check if whole is not None and whole.member in members else None
        # An unknown member is dropped, which the quotation marks then show. The types are built by a call, since the
        # names are data.
        typed_dict: Any = TypedDict
        url: Any = Literal.__getitem__(endpoint.url)
        body = typed_dict("body", members, total=False)
        envelope = {"custom_id": _NonEmpty, "method": Literal["POST"], "url": url, "body": body}
        request = typed_dict("request", envelope)
        self._decode = msgspec.json.Decoder(request).decode

    def read(self, line: int, raw: bytes) -> Row | None:
        """Return the row of a line that breaks no rule, or None: then nothing is known about it.

        Left to the caller is whether the custom_id was used before.
        """
        try:
            request: Any = self._decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        custom_id, body = request["custom_id"], request["body"]
        model, prompt = body.get("model"), body.get(self._prompt)
        if (
            prompt is None
            or custom_id.isspace()
            or (model is not None and self._served_names is not None and model not in self._served_names)
            or (self._whole is not None and self._whole(body) is not None)
        ):
            return None
        # Every string and every name has two quotation marks. If the text has no more than those of what was
        # decoded, then no member was dropped for being unknown and none for being there twice.
        conversation = type(prompt) is list
        marks = _ENVELOPE_MARKS + 2 * (len(body) + (4 * len(prompt) if conversation else 1) + (model is not None))
        if _BACKSLASH in raw:
            # An escape that spells the mark by its number would be counted on one side only.
            if raw.find(b"u0022") >= 0:
                return None
            marks += custom_id.count('"') + (model.count('"') if model else 0)
            if conversation:
                for message in prompt:
                    marks += message["role"].count('"') + message["content"].count('"')
            else:
                marks += prompt.count('"')
        if raw.count(_MARK) != marks:
            return None
        return Row(line, custom_id, self._url, _body_text(raw), model, None)


def plain_reader(endpoint: Endpoint, served_names: frozenset[str] | None) -> PlainReader | None:
    """Return the reader for an endpoint, None where its rows are rarely plain."""
    return PlainReader(endpoint, served_names) if endpoint.url in _PROMPTS else None


def _type_of(check: ValueCheck | None) -> Any:
    """Return a type that admits no value that the check refuses, None where there is no simple one."""
    if isinstance(check, NumberRange):
        bounds: Any = {"ge": check.minimum, "le": check.maximum, "gt": check.above}
        return Annotated[int if check.whole else float, msgspec.Meta(**bounds)] | None
    if isinstance(check, JsonType) and check.types == {"boolean"}:
        return bool | None
    return None


def _body_text(raw: bytes) -> bytes:
    """Return the body as it stands in a valid line of exactly the four members.

    Nearly every writer puts body last, behind members without a brace. Then the first brace behind the outer one
    opens it, and the last but one closes it. A brace right behind ``"body":`` can't be part of a string: there the
    quotation marks would be escaped. A member behind body would stand between the last two braces.
    """
    start = raw.find(_BRACE, 1)
    if raw.endswith(b"}}") and (raw.startswith(b'"body": ', start - 8) or raw.startswith(b'"body":', start - 7)):
        return raw[start:-1]
    return bytes(_RAW_BODY.decode(raw).body)
