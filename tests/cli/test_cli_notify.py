"""`onnx-ops notify`, and the findings of `doctor` about it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_ops.app.context import Project
from onnx_ops.cli.main import app
from onnx_ops.cli.watch import _notify
from onnx_ops.config.settings import load_settings
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from onnx_ops.testing.fakes import FakeNotifier
from onnx_ops.testing.notifiers import Reply, WebhookSink
from tests.release.release_parts import Scene


def github(repository: str, *others: str) -> str:
    """Return the value of ONNX_OPS_NOTIFY for a repository and other notifiers."""
    return json.dumps([*others, {"notifier": "github", "options": {"repository": repository}}])


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))
    monkeypatch.setenv("ONNX_OPS_NOTIFY", "webhook")


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookSink]:
    with WebhookSink().open() as inbox:
        monkeypatch.setenv("ONNX_OPS_NOTIFY_WEBHOOK", f"{inbox.url}/hidden")
        yield inbox


def test_notify_test_with_webhook_sends_message(inbox: WebhookSink) -> None:
    result = CliRunner().invoke(app, ["notify", "--test"])
    assert result.exit_code == 0
    assert "webhook: onnx-ops: a test" in result.output
    assert "notifications arrive here" in inbox.requests[0].document["text"]


def test_notify_test_with_failing_webhook_exits_with_4(
    inbox: WebhookSink, capfd: pytest.CaptureFixture[str]
) -> None:
    inbox.answer = lambda _: Reply(status=404)
    result = CliRunner().invoke(app, ["notify", "--test", "--json"])
    assert result.exit_code == 4
    output = capfd.readouterr().out
    (delivery,) = json.loads(output)
    assert "HTTP 404" in delivery["error"]
    assert "hidden" not in output


def test_notify_without_pending_notifications_sends_nothing(inbox: WebhookSink) -> None:
    result = CliRunner().invoke(app, ["notify"])
    assert (result.exit_code, result.output) == (0, "nothing to send\n")
    assert inbox.requests == []


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--test"], {"ONNX_OPS_NOTIFY": ""}, "no notifier is set"),
        (["--test"], {"ONNX_OPS_NOTIFY": "webhok"}, "Did you mean 'webhook'"),
        (["--test"], {"ONNX_OPS_NOTIFY": github("acme")}, "is not a repository"),
        (["--test"], {"ONNX_OPS_NOTIFY": "github"}, "missing key 'repository'"),
        (["--test"], {"ONNX_OPS_NOTIFY": "github:acme/models"}, "'github:acme/models'"),
        (["digits", "--test"], {}, "--test takes no endpoint"),
        (["nowhere"], {}, "there is no endpoint of this name"),
    ],
)
def test_notify_with_wrong_settings_or_arguments_exits_with_2(
    arguments: list[str], environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["notify", *arguments])
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.usefixtures("inbox")
def test_doctor_checks_each_notifier(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNX_OPS_NOTIFY", github("acme/models", "webhook"))
    for name in ("ONNX_OPS_NOTIFY_GITHUB_TOKEN", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    CliRunner().invoke(app, ["doctor", "--json"])
    findings = {one["check"]: one for one in json.loads(capfd.readouterr().out)}
    assert findings["notifier webhook"]["ok"]
    assert "127.0.0.1" in findings["notifier webhook"]["found"]
    assert not findings["notifier github(repository=acme/models)"]["ok"]
    assert (
        "ONNX_OPS_NOTIFY_GITHUB_TOKEN"
        in findings["notifier github(repository=acme/models)"]["remedy"]
    )


TIMEOUT_S = 60.0


def test_reconcile_watch_sends_notifications_while_running_and_at_end(tmp_path: Path) -> None:
    scene = Scene()
    scene.world.notifiers["chat"] = chat = FakeNotifier()
    events: list[WatchEvent] = []
    heard = threading.Event()

    def hear(report: WatchEvent) -> None:
        events.append(report)
        heard.set()

    watcher = WatchLoop(scene.context, ReconcileQueue(), interval_s=3600.0, on_event=hear)
    scene.bind()
    scene.serve(scene.publish("a"))
    with _notify(
        Project(settings=load_settings(tmp_path), context=scene.context), watcher, (), 3600.0
    ):
        assert heard.wait(TIMEOUT_S)
        scene.serve(scene.publish("b"))
    assert [notice.headline for notice in chat.received] == [
        "first deployment: v1",
        "v2 has all traffic",
    ]
    assert [(report.kind, report.did) for report in events] == [
        (WatchEventKind.NOTIFIED, "chat")
    ] * 2
    assert events[-1].why == "digits: v2 has all traffic"


def test_reconcile_watch_without_notifier_starts_no_thread(tmp_path: Path) -> None:
    scene = Scene()
    watcher = WatchLoop(scene.context, ReconcileQueue(), interval_s=1.0, on_event=lambda _: None)
    before = threading.active_count()
    with _notify(
        Project(settings=load_settings(tmp_path), context=scene.context), watcher, (), 1.0
    ):
        assert threading.active_count() == before


def test_rollback_of_unknown_endpoint_sends_no_notification(
    inbox: WebhookSink, tmp_path: Path
) -> None:
    """Such a rollback has nothing to report, and no process is started for it."""
    result = CliRunner().invoke(app, ["rollback", "nowhere", "--reason", "slow", "--wait"])
    assert result.exit_code == 2
    assert inbox.requests == []
    assert not (tmp_path / ".onnx-ops" / "notify.log").exists()
