"""Secrets out of text that is shown."""

from __future__ import annotations

import pytest

from airflow_vllm_batch.redaction import Redactor, masked_url


def test_known_secrets_are_replaced_and_nothing_else_is() -> None:
    redact = Redactor(["hunter22", "hunter22-and-more", "abc"])
    assert redact("key=hunter22-and-more, other=hunter22, abc") == "key=***, other=***, abc"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://h/p?X-Amz-Signature=s", "https://h/p?***"),
        ("https://u:pw@h/p", "https://h/p"),
        ("https://u:pw@h/p?a=b#c", "https://h/p?***"),
        ("https://h/p", "https://h/p"),
        ("s3://b/a?b#c", "s3://b/a?b#c"),
        ("/data/a?b", "/data/a?b"),
    ],
)
def test_only_what_signs_an_http_url_is_masked(uri: str, shown: str) -> None:
    assert masked_url(uri) == shown


def test_masking_twice_changes_nothing_more() -> None:
    assert masked_url(masked_url("https://h/p?sig=1")) == "https://h/p?***"
