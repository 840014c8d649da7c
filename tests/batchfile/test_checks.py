"""The envelope, the order of the rules, and what the checker keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_vllm_batch.batchfile import BadRow, Checker, Fault, Row, Rules
from tests.batchfile.batch_lines import CHAT, COMPLETIONS, EMBEDDINGS, MINIMAL, SCORE, line

ALL = Rules(unknown_parameters="allow")


def row(raw: bytes, rules: Rules = ALL) -> Row:
    verdict = Checker(rules).check(1, raw)
    assert isinstance(verdict, Row), verdict
    return verdict


def fault(raw: bytes, rules: Rules | None = None) -> Fault:
    verdict = Checker(rules or Rules()).check(7, raw)
    assert isinstance(verdict, BadRow), verdict
    return verdict.fault


@pytest.mark.parametrize("url", MINIMAL)
def test_the_least_body_of_each_endpoint_runs(url: str) -> None:
    found = row(line(url))
    assert (found.line, found.custom_id, found.url, found.model, found.extra) == (1, "r-1", url, None, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}',
        '{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s}',
        '{"custom_id":"a","method":"POST","url":"/v1/completions","body"  :  %s  }  ',
        '{"body": %s, "custom_id": "a", "method": "POST", "url": "/v1/completions"}',
        '{"custom_id": "{\\"body\\": {x", "method": "POST", "url": "/v1/completions", "body": %s}',
        '{"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": %s}',
        '\ufeff{"custom_id": "a", "method": "POST", "url": "/v1/completions", "b\\u006fdy": %s}',
        '{"x": {"body": {"prompt": "no"}}, "custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}',
    ],
)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_the_body_is_handed_on_byte_for_byte(text: str, *, warm: bool) -> None:
    body = '{ "prompt":"caf\\u00e9 \\/ é {}", "max_tokens" : 8, "temperature":1.0e-1, "seed":9223372036854775807 }'
    checker = Checker(Rules())
    if warm:
        assert isinstance(checker.check(1, line(COMPLETIONS)), Row)
    found = checker.check(2, (text % body).encode())
    assert isinstance(found, Row)
    assert found.body == body.encode()


def test_foreign_members_stay_with_the_row() -> None:
    found = row(
        b'{"custom_id":"a","label": 1.50,"method":"POST","url":"/v1/completions","body":{"prompt":"p"},"x":[ 1 ]}'
    )
    assert found.extra is not None
    assert json.loads(found.extra) == {"label": 1.5, "x": [1]}
    assert b"1.50" in found.extra


def test_the_model_of_the_row_is_told() -> None:
    assert row(line(model="m")).model == "m"


def test_any_model_passes_while_the_served_names_are_not_known() -> None:
    assert row(line(model="whatever"), Rules(served_names=None)).model == "whatever"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        # Each line breaks this rule and all those after it.
        (b'{"custom_id": "\xff", "method": "GET", oops', "invalid_encoding"),
        (b'{"custom_id": "", "method": "GET", oops', "invalid_json"),
        (b'{"custom_id": 5, "method": "GET", "url": "/", "body": {"stream": true}}', "invalid_request"),
        (b'{"custom_id": "used", "method": "GET", "url": "/", "body": {"stream": true}}', "unsupported_method"),
        (b'{"custom_id": "used", "method": "POST", "url": "/", "body": {"stream": true}}', "duplicate_custom_id"),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/", "body": {"model": "x", "stream": true}}',
            "unsupported_url",
        ),
        (line(model="x", stream=True, top_P=1), "model_mismatch"),
        (line(stream=True, top_P=1), "stream_not_supported"),
        (line(messages=..., top_P=1), "invalid_request"),
        (line(top_P=1), "unknown_parameter"),
    ],
)
def test_the_first_rule_that_is_broken_gives_the_code(raw: bytes, code: str) -> None:
    checker = Checker(Rules(served_names=frozenset({"m"})))
    checker.check(1, line(custom_id="used"))
    verdict = checker.check(2, raw)
    assert isinstance(verdict, BadRow)
    assert verdict.fault.code == code


def test_an_id_belongs_to_the_first_line_even_if_that_is_refused() -> None:
    checker = Checker(Rules())
    refused = [line(custom_id="a", top_P=1), line(custom_id="b").replace(b'"POST"', b'"GET"'), line(custom_id="c", n=0)]
    refused.append(b'{"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": NaN}}')
    refused.append(line(custom_id="e", messages=[{"role": "user", "content": "x"}]).replace(b'"x"', b'"\xff"'))
    for number, raw in enumerate(refused, 1):
        assert isinstance(checker.check(number, raw), BadRow)
    for number, custom_id in enumerate("abcde", 1):
        verdict = checker.check(10 + number, line(custom_id=custom_id))
        assert isinstance(verdict, BadRow)
        assert verdict.fault.code == "duplicate_custom_id"
        assert f"already used on line {number}" in verdict.fault.message


def test_a_torn_line_does_not_take_the_id_from_the_whole_one() -> None:
    checker = Checker(Rules())
    torn = checker.check(1, line(custom_id="a")[:-20])
    assert isinstance(torn, BadRow)
    assert torn.custom_id is None
    assert isinstance(checker.check(2, line(custom_id="a")), Row)


@pytest.mark.parametrize("other", ["A", "a ", " a", "á", "a\u0301", "\uff41"])
def test_ids_are_compared_code_point_by_code_point(other: str) -> None:
    checker = Checker(Rules())
    assert isinstance(checker.check(1, line(custom_id="a")), Row)
    assert isinstance(checker.check(2, line(custom_id=other)), Row)


@pytest.mark.parametrize("custom_id", ["\u3000", "\u2028", "\x1f"])
def test_an_id_of_white_space_only_is_refused(custom_id: str) -> None:
    assert fault(line(custom_id=custom_id)).field == "custom_id"


@pytest.mark.parametrize("beside", ["model", "messages", "max_tokens", "temperature", "seed", "response_format"])
def test_a_body_parameter_beside_body_is_refused(beside: str) -> None:
    found = fault(line(beside={beside: None}))
    assert (found.code, found.field) == ("unknown_parameter", beside)


@pytest.mark.parametrize("beside", ["metadata", "user", "expected", "prompt", "input", "query", "custom"])
def test_what_is_no_parameter_of_the_endpoint_may_stand_beside_body(beside: str) -> None:
    assert row(line(beside={beside: "x"}), Rules()).extra == json.dumps({beside: "x"}, separators=(",", ":")).encode()


def test_unknown_parameters_are_counted_under_warn() -> None:
    checker = Checker(Rules(unknown_parameters="warn"))
    for number in range(3):
        assert isinstance(checker.check(number, line(custom_id=f"r-{number}", top_P=1, foo=2)), Row)
    assert checker.unknown_parameters == {"top_P": 3, "foo": 3}


def unknown(number: int) -> dict[str, Any]:
    return {f"x{number}" + "y" * 500: 1}


def test_counting_unknown_parameters_takes_bounded_memory() -> None:
    checker = Checker(Rules(unknown_parameters="warn"))
    for number in range(1500):
        checker.check(number, line(custom_id=f"r-{number}", **unknown(number)))
    assert len(checker.unknown_parameters) == 1001
    assert checker.unknown_parameters["(other names)"] == 500
    assert max(map(len, checker.unknown_parameters)) <= 100


def test_allowed_parameters_pass_whether_refused_by_name_or_unknown() -> None:
    raw = line(chat_template="{{ x }}", brand_new=1)
    assert fault(raw).code == "parameter_not_allowed"
    assert row(raw, Rules(allow_parameters=frozenset({"chat_template", "brand_new"})))


def test_a_line_longer_than_a_row_may_be_is_refused_unread() -> None:
    found = fault(line(messages=[{"role": "user", "content": "x" * 2000}]), Rules(max_row_bytes=1024))
    assert found.code == "invalid_request"
    assert "1,024" in found.message


def test_an_endpoint_of_another_task_never_counts_for_strict() -> None:
    found = fault(line(EMBEDDINGS), Rules(task="generate"))
    assert (found.code, found.counts_for_strict) == ("unsupported_url", False)
    assert row(line(EMBEDDINGS), Rules(task="embed"))
    assert row(line(SCORE), Rules(task="score"))


@pytest.mark.parametrize("text", ["x" * 5000, "a\nb\x1b[31m\u202e\u2028", '"quoted"', "\\"])
def test_messages_are_short_and_printable_whatever_the_file_says(text: str) -> None:
    unknown: dict[str, Any] = {text: 1}
    lines = [
        line(custom_id=text).replace(b'"POST"', b'"GET"'),
        line(custom_id="a").replace(CHAT.encode(), json.dumps(text)[1:-1].encode()),
        line(model=text),
        line(**unknown),
        line(response_format={"type": text}),
        line(messages=[{"role": "user", "content": [{"type": text}]}]),
        line(temperature=text),
        json.dumps({text: {text: float("nan")}}).encode(),
    ]
    for raw in lines:
        message = fault(raw, Rules(served_names=frozenset({"m"}))).message
        assert message.isprintable()
        assert len(message) < 900


def test_bytes_are_counted_with_the_byte_order_mark() -> None:
    assert "at byte 5" in fault(b"\xef\xbb\xbf{x").message
    assert "at byte 6" in fault(b'\xef\xbb\xbf{"\xff').message


def test_only_one_byte_order_mark_is_ignored() -> None:
    assert Checker(Rules()).check(1, b"\xef\xbb\xbf \t") is None
    assert fault(b"\xef\xbb\xbf\xef\xbb\xbf").code == "invalid_json"


def test_a_row_is_a_value() -> None:
    assert row(line()) == row(line())
    with pytest.raises(AttributeError):
        row(line()).line = 2  # type: ignore[misc]


def test_the_same_line_gets_the_same_verdict_first_and_later() -> None:
    lines: list[dict[str, Any]] = [{}, {"stream": False}, {"n": 0}, {"logprobs": 1}, {"user": "u"}, {"stop": "x"}]
    warm = Checker(Rules())
    warm.check(1, line(custom_id="warm"))
    for body in lines:
        raw = line(custom_id=f"r-{body}", **body)
        assert warm.check(2, raw) == Checker(Rules()).check(2, raw)
