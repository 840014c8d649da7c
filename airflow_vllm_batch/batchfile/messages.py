"""Rules about chat messages, content parts and the media in them. Repeats no text of a message in a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_vllm_batch.batchfile.media import media_fault
from airflow_vllm_batch.batchfile.rows import Fault, Rules
from airflow_vllm_batch.batchfile.wording import found, kind, quote
from airflow_vllm_batch.contract import ErrorCode

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
TENSOR_PARTS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil"})
"""Parts that carry serialised tensors or objects, which are loaded where the engine runs."""
URL_MEMBERS = ("image_url", "audio_url", "video_url", "file_url")
PART_TYPES = (
    TEXT_PARTS
    | TENSOR_PARTS
    | {
        "image_url",
        "input_image",
        "audio_url",
        "input_audio",
        "video_url",
        "file",
        "input_file",
        "tool_reference",
        "reasoning_text",
        "summary_text",
    }
)


def _invalid(field: str, reason: str) -> Fault:
    return Fault(ErrorCode.INVALID_REQUEST, field, f"{field} {reason}")


def messages_fault(messages: Any, field: str, rules: Rules) -> Fault | None:
    """Check a conversation: a list of objects with a role, and content of a known shape."""
    if type(messages) is not list:
        return _invalid(field, f"must be an array, got {kind(messages)}")
    if not messages:
        return _invalid(field, "is empty")
    for index, message in enumerate(messages):
        # Nearly every message is a role and a text.
        if type(message) is dict and type(message.get("role")) is str:
            if type(message.get("content")) is str and len(message) == 2:
                continue
            fault = _message_fault(message, f"{field}[{index}]", rules)
        else:
            fault = _role_fault(message, f"{field}[{index}]")
        if fault:
            return fault
    return None


def _role_fault(message: Any, field: str) -> Fault:
    if type(message) is not dict:
        return _invalid(field, f"must be an object, got {kind(message)}")
    if message.get("role") is None:
        return _invalid(f"{field}.role", "is required")
    return _invalid(f"{field}.role", f"must be a string, got {kind(message['role'])}")


def _message_fault(message: Mapping[str, Any], field: str, rules: Rules) -> Fault | None:
    calls = message.get("tool_calls")
    if calls is not None and type(calls) is not list:
        return _invalid(f"{field}.tool_calls", f"must be an array, got {kind(calls)}")
    return content_fault(message.get("content"), f"{field}.content", rules)


def content_fault(content: Any, field: str, rules: Rules) -> Fault | None:
    """Check a message's content: null, a string, or a list of parts."""
    if content is None or type(content) is str:
        return None
    if type(content) is not list:
        return _invalid(field, f"must be a string or an array of parts, got {kind(content)}")
    for index, part in enumerate(content):
        if type(part) is str:
            continue
        fault = part_fault(part, f"{field}[{index}]", rules)
        if fault:
            return fault
    return None


def part_fault(part: Any, field: str, rules: Rules) -> Fault | None:
    """Check one content part: its type is known, and what it points to may be fetched."""
    if type(part) is not dict:
        return _invalid(field, f"must be an object, got {kind(part)}")
    which = part.get("type")
    if which is None:
        return _invalid(f"{field}.type", "is required")
    if type(which) is not str:
        return _invalid(f"{field}.type", f"must be a string, got {kind(which)}")
    if which not in PART_TYPES:
        known = "text, image_url, input_audio, audio_url, video_url"
        return _invalid(f"{field}.type", f"must be a known part type such as {known}, found {quote(which, 40)}")
    # By member, not by type: vLLM reads a member that is there whatever the type says.
    for name in TENSOR_PARTS:
        if (name == which or part.get(name) is not None) and name not in rules.allow_parameters:
            reason = f"{field}: a part of type {name} is not allowed: it carries serialised tensors or objects"
            return Fault(ErrorCode.PARAMETER_NOT_ALLOWED, field, reason)
    if which in TEXT_PARTS and which != "refusal":
        fault = _text_fault(part, "thinking" if which == "thinking" else "text", field)
        if fault:
            return fault
    return _urls_fault(part, which, field, rules)


def _text_fault(part: Mapping[str, Any], member: str, field: str) -> Fault | None:
    text = part.get(member)
    # A list is how some models take thinking; the engine knows which.
    if type(text) is str or (member == "thinking" and text is not None):
        return None
    if text is None:
        return _invalid(f"{field}.{member}", "is required")
    return _invalid(f"{field}.{member}", f"must be a string, got {kind(text)}")


def _urls_fault(part: Mapping[str, Any], which: str, field: str, rules: Rules) -> Fault | None:
    # A part that only names a cached item by its uuid has its media member null.
    if which in URL_MEMBERS and part.get(which) is None and part.get("uuid") is None:
        return _invalid(f"{field}.{which}", "is required")
    for name in URL_MEMBERS:
        value = part.get(name)
        where = f"{field}.{name}"
        if type(value) is dict:
            value, where = value.get("url"), f"{where}.url"
            if value is None and part.get("uuid") is None:
                return _invalid(where, "is required")
        if value is not None:
            fault = media_fault(value, where, rules.allowed_media_domains)
            if fault:
                return fault
    file = part.get("file")
    if type(file) is dict and file.get("file_url") is not None:
        return media_fault(file["file_url"], f"{field}.file.file_url", rules.allowed_media_domains)
    return None


def response_input_fault(items: Any, field: str, rules: Rules) -> Fault | None:
    """Check the input of a responses request: a text, or a list of items."""
    if type(items) is str:
        return None if items else _invalid(field, "is empty")
    if type(items) is not list:
        return _invalid(field, f"must be a string or an array, got {kind(items)}")
    if not items:
        return _invalid(field, "is empty")
    for index, item in enumerate(items):
        where = f"{field}[{index}]"
        if type(item) is not dict:
            return _invalid(where, f"must be an object, got {kind(item)}")
        fault = _item_media_fault(item, where, rules)
        if fault:
            return fault
        if item.get("role") is not None:
            fault = content_fault(item.get("content"), f"{where}.content", rules)
            if fault:
                return fault
    return None


def _item_media_fault(item: Mapping[str, Any], field: str, rules: Rules) -> Fault | None:
    """Check the media of an item that is no message, such as the output of a tool; its shape is the engine's matter."""
    for member in ("content", "output"):
        parts = item.get(member)
        for index, part in enumerate(parts if type(parts) is list else ()):
            fault = _urls_fault(part, "", f"{field}.{member}[{index}]", rules) if type(part) is dict else None
            if fault:
                return fault
    return None


def text_or_parts_fault(value: Any, field: str, rules: Rules, *, many: bool) -> Fault | None:
    """Check what is to be scored: a text, an object with content parts, or (``many``) a list of these."""
    if type(value) is str:
        return None
    if type(value) is dict:
        content = value.get("content")
        if type(content) is not list:
            return _invalid(f"{field}.content", f"must be an array of parts, got {kind(content)}")
        return content_fault(content, f"{field}.content", rules)
    if not many or type(value) is not list:
        return _invalid(field, f"must be a string{', an array' if many else ''} or an object, got {found(value)}")
    if not value:
        return _invalid(field, "is empty")
    for index, item in enumerate(value):
        fault = text_or_parts_fault(item, f"{field}[{index}]", rules, many=False)
        if fault:
            return fault
    return None
