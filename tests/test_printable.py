"""Foreign text cannot give commands to a terminal, a runner or a browser."""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.printable import disarm, hide_secrets_of, show, show_controls


@given(st.text())
def test_show_controls_of_any_text_leaves_no_control_character_but_tab_and_newline(
    text: str,
) -> None:
    shown = show_controls(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    assert not re.search("[\u2028-\u202e\u2066-\u2069]", shown)


@given(st.text(st.sampled_from("::#[vso \n\r\tax\x1b\u2028")))
def test_disarm_of_any_text_leaves_no_workflow_command(text: str) -> None:
    shown = disarm(text)
    assert "##[" not in shown
    assert "##vso" not in shown
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())
    assert disarm(shown) == shown


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("postgresql+psycopg2://user:pw@host/db", (":pw@",)),
        (
            "https://user:p%40ssw0rd-1@host/x.onnx?sig=abcdefgh%2F&v=2",
            ("p%40ssw0rd-1", "p@ssw0rd-1", "abcdefgh"),
        ),
        ("s3://key:very-secret@bucket/prefix", ("very-secret",)),
    ],
)
def test_show_after_hide_secrets_of_url_shows_host_without_secrets(
    url: str, secrets: tuple[str, ...]
) -> None:
    hide_secrets_of(url)
    shown = show(f"{url} does not answer: {unquote(url)}")
    assert not [secret for secret in secrets if secret in shown]
    assert str(urlsplit(url).hostname) in shown


@pytest.mark.parametrize(
    "text", ["plain", "Zürich ≤ 5 % 模型", "a::b", "## title", "tab\tline\nnext", "👩‍🔬"]
)
def test_disarm_of_plain_text_returns_it_unchanged(text: str) -> None:
    assert disarm(text) == text
