"""Media URLs and the content parts that hold them."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_vllm_batch.batchfile import BadRow, Checker, Row, Rules
from airflow_vllm_batch.batchfile.media import media_fault
from tests.batchfile.batch_lines import CHAT, RERANK, RESPONSES, SCORE, line


def refused(url: str, domains: tuple[str, ...] | None = None) -> bool:
    fault = media_fault(url, "f", domains)
    assert fault is None or fault.code == "media_not_allowed"
    return fault is not None


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,iVBORw0KGgo=",
        "DATA:,x",
        "https://images.example.com/a.png",
        "HTTPS://Images.Example.com:8443/a.png?sig=%20#x",
        "https://example.com./a.png",
        "https://8.8.8.8/a.png",
        "https://[2001:4860:4860::8888]/a.png",
        "https://bücher.example/a.png",
        "https://localhost.example.com/a.png",
        "https://10.example.com/a.png",
    ],
)
def test_data_and_https_to_public_hosts_pass(url: str) -> None:
    assert not refused(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "FILE:/etc/hostname",
        "/etc/hostname",
        "a.png",
        "",
        "//example.com/a.png",
        "http://images.example.com/a.png",
        "ftp://example.com/a",
        "s3://bucket/a",
        "gopher://example.com/",
        "javascript:alert(1)",
        "https:example.com/a",
        "https:/example.com/a",
        "https://",
        "https:///a.png",
        " https://example.com/a.png",
        "https://example.com/a b.png",
        "https://example.com\\@127.0.0.1/",
        "https://example.com\n/a",
        "https://example.com:port/",
    ],
)
def test_other_schemes_and_malformed_urls_are_refused(url: str) -> None:
    assert refused(url)
    assert refused(url, ("example.com", "images.example.com", "127.0.0.1", ""))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "localhost.localdomain",
        "metadata.google.internal",
        "minio",
        "printer.local",
        "db.svc",
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "0x7f000001",
        "0x7f.1",
        "0x7F.0x0.0x0.0x1",
        "0",
        "0.0.0.0",
        "10.0.0.1",
        "010.0.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "192.168.257",
        "169.254.169.254",
        "2852039166",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "１２７.0.0.1",
        "127。0。0。1",
        "ⓛocalhost",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fe80::1]",
        "[fe80::1%25eth0]",
        "[fc00::1]",
        "[ff02::1]",
        "[::1",
        "[example.com]",
        "%6c%6f%63%61%6c%68%6f%73%74",
        "127.0.0.1%2f",
        "user@example.com",
        "example.com@127.0.0.1",
        "1.2.3.4.5",
        "256.256.256.256",
        "1.2.3.0x",
        "09.0.0.1",
        "exa mple.com",
        "-a-.example.com",
        "a..example.com",
    ],
)
def test_private_hosts_are_refused_in_any_spelling(host: str) -> None:
    assert refused(f"https://{host}/a.png")
    assert refused(f"https://{host}:8443/a.png")
    assert refused(f"http://{host}/a.png")


def test_with_a_list_of_domains_only_those_pass() -> None:
    domains = ("Images.Example.com", "minio", "10.0.0.5")
    for host in ("images.example.com", "IMAGES.example.com.", "minio:9000", "10.0.0.5"):
        assert not refused(f"https://{host}/a.png", domains)
    for host in ("example.com", "a.images.example.com", "10.0.0.6"):
        assert refused(f"https://{host}/a.png", domains)
    assert not refused("data:,x", ())
    assert refused("https://images.example.com/a.png", ())
    assert refused("http://minio/a.png", domains)


def test_a_refusal_repeats_no_signature() -> None:
    for url in ("http://10.0.0.1/a?sig=SECRET", "s3://key:SECRET@bucket/a", "https://u:SECRET@example.com/"):
        fault = media_fault(url, "f", None)
        assert fault is not None
        assert "SECRET" not in fault.message


def verdict(url: str, rules: Rules | None = None, /, **body: Any) -> str:
    found = Checker(rules or Rules()).check(1, line(url, **body))
    assert found is not None
    return "run" if isinstance(found, Row) else f"{found.fault.code} {found.fault.field}"


BAD = "https://127.0.0.1/a"
GOOD = "https://example.com/a"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "x"}, "run"),
        ({"type": "text"}, "invalid_request .text"),
        ({"type": "text", "text": 5}, "invalid_request .text"),
        ({"type": "thinking", "thinking": "x"}, "run"),
        ({"type": "refusal", "refusal": "x"}, "run"),
        ({"text": "x"}, "invalid_request .type"),
        ({"type": "txt", "text": "x"}, "invalid_request .type"),
        ({"type": 5}, "invalid_request .type"),
        (5, "invalid_request "),
        ("text", "run"),
        ({"type": "image_url", "image_url": {"url": GOOD}}, "run"),
        ({"type": "image_url", "image_url": GOOD}, "run"),
        ({"type": "image_url", "image_url": {"url": BAD}}, "media_not_allowed .image_url.url"),
        ({"type": "image_url", "image_url": BAD}, "media_not_allowed .image_url"),
        ({"type": "image_url", "image_url": {}}, "invalid_request .image_url.url"),
        ({"type": "image_url"}, "invalid_request .image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "invalid_request .image_url.url"),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, "run"),
        ({"type": "audio_url", "audio_url": {"url": BAD}}, "media_not_allowed .audio_url.url"),
        ({"type": "video_url", "video_url": {"url": BAD}}, "media_not_allowed .video_url.url"),
        ({"type": "input_image", "image_url": BAD}, "media_not_allowed .image_url"),
        ({"type": "input_file", "file_url": BAD}, "media_not_allowed .file_url"),
        ({"type": "file", "file": {"file_url": BAD}}, "media_not_allowed .file.file_url"),
        ({"type": "text", "text": "x", "image_url": BAD, "uuid": "u"}, "media_not_allowed .image_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "run"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "parameter_not_allowed "),
        ({"type": "text", "text": "x", "audio_embeds": "AAAA"}, "parameter_not_allowed "),
        ({"type": "prompt_embeds", "data": "AAAA"}, "parameter_not_allowed "),
    ],
)
def test_content_parts_of_chat(part: Any, expected: str) -> None:
    found = verdict(CHAT, messages=[{"role": "user", "content": [part]}])
    code, _, member = expected.partition(" ")
    assert found == ("run" if expected == "run" else f"{code} body.messages[0].content[0]{member}")


def test_tensors_pass_where_they_are_allowed() -> None:
    rules = Rules(allow_parameters=frozenset({"image_embeds"}))
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    assert verdict(CHAT, rules, messages=[{"role": "user", "content": [part]}]) == "run"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None, "tool_calls": []}, "run"),
        ({"role": "assistant"}, "run"),
        ({"role": "tool", "tool_call_id": "c", "content": "x"}, "run"),
        ({"role": "assistant", "tool_calls": 5}, "invalid_request .tool_calls"),
        ({"role": "user", "content": {}}, "invalid_request .content"),
        ({"role": None, "content": "x"}, "invalid_request .role"),
    ],
)
def test_messages(message: Any, expected: str) -> None:
    code, _, member = expected.partition(" ")
    found = verdict(CHAT, messages=[{"role": "user", "content": "x"}, message])
    assert found == ("run" if expected == "run" else f"{code} body.messages[1]{member}")


def test_media_are_checked_wherever_vllm_reads_them() -> None:
    part = {"type": "input_image", "image_url": BAD}
    assert verdict(RESPONSES, input=[{"role": "user", "content": [part]}]).startswith("media_not_allowed")
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    assert verdict(RESPONSES, input=[output]) == "media_not_allowed body.input[0].output[0].image_url"
    image = {"content": [{"type": "image_url", "image_url": {"url": BAD}}]}
    assert verdict(SCORE, text_1=image).startswith("media_not_allowed body.text_1.content[0]")
    assert verdict(RERANK, documents=["x", image]).startswith("media_not_allowed body.documents[1].content[0]")


def test_no_message_repeats_the_text_of_a_part() -> None:
    secret = "a prompt that nobody else may read"
    bodies: list[dict[str, Any]] = [
        {"messages": secret},
        {"messages": [secret]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": [secret]}]}]},
        {"messages": [{"role": "user", "content": {"text": secret}}]},
        {"stop": [secret, ""]},
        {"response_format": secret},
        {"tools": secret},
        {"metadata": {}, "user": [secret]},
        {"temperature": secret * 3},
    ]
    for body in bodies:
        found = Checker(Rules()).check(1, line(CHAT, **body))
        assert isinstance(found, BadRow)
        assert secret not in found.fault.message
