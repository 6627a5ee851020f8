"""Who may read the console, and how often it reads."""

from __future__ import annotations

import base64
import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from onnx_ops.console.access import VARIABLE, choose_hosts, read_token
from onnx_ops.console.server import ConsoleServer
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import RefusedError, UserError
from onnx_ops.testing.fakes import FakeProvider
from tests.console.console_parts import Console, project_of, serving_console
from tests.release.release_scenes import on_trial, serving

TOKEN = "a-token-of-24-characters"  # noqa: S105 (of this test)


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'any:{password}'.encode()).decode()}"


@pytest.mark.parametrize("path", ["/", "/endpoints/digits", "/events", "/nothing"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_console_with_method_other_than_get_or_head_returns_405(
    console: Console, path: str, method: str
) -> None:
    answer = console.ask(path, method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_head_request_returns_status_without_body(console: Console) -> None:
    for path in ("/", "/history", "/events", "/static/console.js"):
        answer = console.ask(path, "HEAD")
        assert (answer.status, answer.text) == (200, "")


def test_responses_have_strict_content_policy_without_inline_code(console: Console) -> None:
    for path in ("/", "/endpoints/digits", "/history", "/targets", "/nothing"):
        answer = console.ask(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "<script>" not in answer.text
        assert " style=" not in answer.text
        assert "<style" not in answer.text
        assert " onclick" not in answer.text
        assert 'src="http' not in answer.text
        assert 'href="http' not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_request_with_foreign_or_empty_host_header_returns_421(console: Console, host: str) -> None:
    assert console.ask("/", host=host).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80"])
def test_request_with_loopback_host_header_is_allowed(console: Console, host: str) -> None:
    assert console.ask("/", host=host).status == 200


def test_choose_hosts_beyond_loopback_limits_hosts_only_if_configured() -> None:
    assert choose_hosts("0.0.0.0", ()) is None  # noqa: S104 (no socket)
    assert choose_hosts("10.0.0.1", ()) is None
    own = ("localhost", "127.0.0.1", "[::1]", "10.0.0.1")
    assert choose_hosts("10.0.0.1", ("Console.Example",)) == frozenset({*own, "console.example"})


def test_console_beyond_loopback_or_with_allowed_hosts_without_token_raises_refused_error(
    tmp_path: Path,
) -> None:
    project = project_of(tmp_path, serving("a").context)
    with pytest.raises(RefusedError, match=VARIABLE):
        ConsoleServer(project, "0.0.0.0", 0)  # noqa: S104 (refused)
    with pytest.raises(RefusedError, match=VARIABLE):
        ConsoleServer(project, "127.0.0.1", 0, allowed_hosts=("console.example",))


def test_console_with_token_answers_only_requests_with_valid_authorization(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a").context, token=TOKEN) as console:
        refused = [
            console.ask("/"),
            console.ask(f"/?token={TOKEN}"),
            console.ask("/events"),
            console.ask("/static/console.js"),
            *(
                console.ask("/", authorization=value)
                for value in (basic("wrong"), basic(""), "Basic !", "Bearer", "Bearer x", TOKEN)
            ),
        ]
        allowed = [
            console.ask("/", authorization=value) for value in (basic(TOKEN), f"Bearer {TOKEN}")
        ]
    assert {answer.status for answer in refused} == {401}
    assert refused[0].headers["www-authenticate"].startswith("Basic realm=")
    assert {answer.status for answer in allowed} == {200}


def test_read_token_returns_token_of_private_file_and_rejects_short_variable(
    tmp_path: Path,
) -> None:
    file = tmp_path / "console.token"
    assert read_token(file, {}) == ""
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(RefusedError):
        read_token(file, {})
    file.chmod(0o600)
    assert read_token(file, {}) == TOKEN
    with pytest.raises(UserError, match="shorter"):
        read_token(file, {VARIABLE: "short"})


def test_console_with_many_viewers_reads_endpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    observe = FakeProvider.observe

    def count(provider: FakeProvider, config: EndpointConfig) -> EndpointState | None:
        reads.append(config.endpoint)
        return observe(provider, config)

    context = on_trial().context
    monkeypatch.setattr(FakeProvider, "observe", count)
    with (
        serving_console(tmp_path, context, interval_s=60.0) as console,
        ThreadPoolExecutor(8) as viewers,
    ):
        paths = ["/", "/endpoints/digits", "/history"] * 8
        assert {answer.status for answer in viewers.map(console.ask, paths)} == {200}
    assert reads == ["digits"]


def test_console_without_viewers_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    context = serving("a").context
    monkeypatch.setattr(FakeProvider, "observe", lambda _, config: reads.append(config.endpoint))
    with serving_console(tmp_path, context, interval_s=0.05) as console:
        threading.Event().wait(0.3)
        assert reads == []
        console.show("/")
        assert reads


def test_console_after_stop_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serving_console(tmp_path, serving("a").context) as console:
        console.show("/")
        assert any(thread.name.startswith("console") for thread in threading.enumerate())
    left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    for thread in left:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in left)


def test_event_stream_sends_revision_when_ledger_changes(tmp_path: Path) -> None:
    scene = on_trial()
    with serving_console(tmp_path, scene.context) as console:
        parts = urlsplit(console.address)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        connection.request("GET", "/events")
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/event-stream")

        def next_revision() -> str:
            while not (line := response.readline().decode()).startswith("data: "):
                assert line
            return line[6:].strip()

        first = next_revision()
        assert f'data-revision="{first}"' in console.show("/")
        scene.say(OperatorCommand.PAUSE)
        assert next_revision() != first
        connection.close()
