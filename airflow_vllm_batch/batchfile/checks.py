"""One line to its verdict, in a fixed order: bytes, JSON, the members around the body, then the body.

Every caller gets the same verdict for the same line: the command line's ``validate``, the operator's preflight and
the runner. What only a tokenizer or an engine can decide is left to it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from airflow_vllm_batch.batchfile.body import Endpoint, endpoints, required_fault, unknown_fault
from airflow_vllm_batch.batchfile.duplicates import IdTable
from airflow_vllm_batch.batchfile.envelope import (
    ANSWER_CHANGING,
    ENVELOPE,
    custom_id_fault,
    members_fault,
    method_fault,
    model_fault,
    stream_fault,
    url_fault,
)
from airflow_vllm_batch.batchfile.json_text import (
    JsonFaultError,
    custom_id_of_broken,
    is_usable_id,
    parse,
    wrong_type,
)
from airflow_vllm_batch.batchfile.lines import BYTE_ORDER_MARK, is_blank
from airflow_vllm_batch.batchfile.plain import PlainReader, plain_reader
from airflow_vllm_batch.batchfile.rows import BadRow, Fault, Row, Rules
from airflow_vllm_batch.batchfile.wording import printable, quote
from airflow_vllm_batch.contract import ErrorCode

OTHER_NAMES = "(other names)"
_MAX_COUNTED_NAMES = 1000
_RAW_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Checker:
    """Checks the lines of one input, in order; remembers ids and, under ``warn``, unknown parameters."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.unknown_parameters: Counter[str] = Counter()
        """Under ``warn``: rows a name; names past the first thousand count together as ``(other names)``."""
        self._endpoints = endpoints(rules)
        self._ids = IdTable()
        self._max_row_bytes = rules.max_row_bytes
        self._url = ""
        self._plain: PlainReader | None = None
        """For the endpoint of the last row that took the long way."""

    def check(self, line: int, raw: bytes) -> Row | BadRow | None:
        """Return the row, the bad row, or None for a blank line. Raises nothing, whatever the bytes are."""
        if len(raw) > self._max_row_bytes:
            return self.too_long(line, len(raw))
        if self._plain is not None:
            row = self._plain.read(line, raw)
            if row is not None and self._ids.claim(row.custom_id, line) is None:
                return row
        return self._check_in_full(line, raw)

    def _check_in_full(self, line: int, marked: bytes) -> Row | BadRow | None:
        raw = marked.removeprefix(BYTE_ORDER_MARK)
        try:
            request = parse(raw, skipped=len(marked) - len(raw))
        except JsonFaultError as error:
            if is_blank(marked):
                return None
            custom_id = custom_id_of_broken(raw)
            if custom_id is not None:
                # The id stays with the line; another that has it is a duplicate even so.
                self._ids.claim(custom_id, line)
            return _bad(line, custom_id, error.fault)
        if type(request) is not dict:
            return _bad(line, None, Fault(ErrorCode.INVALID_REQUEST, None, wrong_type(request)))
        fault = self._fault(line, request)
        if fault is not None:
            custom_id = request.get("custom_id")
            return _bad(line, custom_id if is_usable_id(custom_id) else None, fault)
        self._expect(request["url"])
        members = _RAW_MEMBERS.decode(raw)
        model, extra = request["body"].get("model"), _foreign_members(members)
        return Row(line, request["custom_id"], request["url"], bytes(members["body"]), model, extra)

    def _expect(self, url: str) -> None:
        """Try the short cut for this endpoint on the lines to come."""
        if url != self._url:
            self._url = url
            self._plain = plain_reader(self._endpoints[url], self.rules.served_names)

    def too_long(self, line: int, size: int) -> BadRow:
        """Return the bad row of a line that is longer than a row may be, and that nobody has read."""
        message = (
            f"the line has more than max_row_bytes ({size:,} bytes, {self.rules.max_row_bytes:,} are allowed); "
            "give large media by URL or raise max_row_bytes"
        )
        return _bad(line, None, Fault(ErrorCode.INVALID_REQUEST, None, message))

    def _fault(self, line: int, request: dict[str, Any]) -> Fault | None:
        """Return the first fault around the body, or in it."""
        fault = custom_id_fault(request)
        # The id belongs to the first line that carries it, whatever else is wrong there.
        earlier = self._ids.claim(request["custom_id"], line) if fault is None else None
        fault = fault or method_fault(request) or members_fault(request)
        if fault is not None:
            return fault
        if earlier is not None:
            reason = f"custom_id was already used on line {earlier}"
            return Fault(ErrorCode.DUPLICATE_CUSTOM_ID, "custom_id", reason)
        body, url = request["body"], request["url"]
        return (
            url_fault(url, self.rules.task)
            or model_fault(body.get("model"), self.rules.served_names)
            or stream_fault(body.get("stream"))
            or self._misplaced_fault(request, url)
            or self._body_fault(body, self._endpoints[url])
        )

    def _misplaced_fault(self, request: dict[str, Any], url: str) -> Fault | None:
        """Find a body parameter beside body, where nothing would read it."""
        if len(request) == 4:
            return None
        known = self._endpoints[url].checks
        for name in request:
            if name in ANSWER_CHANGING and name in known and not self._admits_unknown(name):
                reason = f"{name} stands beside body, where it has no effect; it belongs inside body"
                return Fault(ErrorCode.UNKNOWN_PARAMETER, name, reason)
        return None

    def _body_fault(self, body: dict[str, Any], endpoint: Endpoint) -> Fault | None:
        fault = required_fault(body, endpoint)
        if fault is not None:
            return fault
        checks = endpoint.checks
        for name, value in body.items():
            try:
                check = checks[name]
            except KeyError:
                if not self._admits_unknown(name):
                    return unknown_fault(name, endpoint)
                continue
            # null means that an optional parameter is not set.
            if check is not None and value is not None:
                fault = check(value, f"body.{name}")
                if fault is not None:
                    return fault
        return endpoint.whole.check(body) if endpoint.whole is not None else None

    def _admits_unknown(self, name: str) -> bool:
        if self.rules.unknown_parameters == "error":
            return False
        if self.rules.unknown_parameters == "warn":
            counted = self.unknown_parameters
            shown = printable(name, 100)
            counted[shown if shown in counted or len(counted) < _MAX_COUNTED_NAMES else OTHER_NAMES] += 1
        return True


def _bad(line: int, custom_id: str | None, fault: Fault) -> BadRow:
    """Return the bad row, with the line and the id put before the fault's own words."""
    named = f"custom_id {quote(custom_id)}: " if custom_id is not None else ""
    return BadRow(line, custom_id, fault._replace(message=f"line {line}: {named}{fault.message}"))


def _foreign_members(members: dict[str, msgspec.Raw]) -> bytes | None:
    foreign = {name: value for name, value in members.items() if name not in ENVELOPE}
    return msgspec.json.encode(foreign) if foreign else None
