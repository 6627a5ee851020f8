"""What the console's pages show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from onnx_ops.console import snapshot
from onnx_ops.console.snapshot import SnapshotReader
from onnx_ops.domain.endpoint import EndpointConfig, EndpointServer, EndpointState
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import ServiceUnavailableError, StillPendingError
from onnx_ops.release.adoption import adopt, find_adoption
from onnx_ops.release.rollback import send_command
from onnx_ops.testing.fakes import FakeProvider
from tests.console.console_parts import Console, publish_with_evidence, serving_console
from tests.release.disk_scenes import on_disk
from tests.release.release_parts import Scene, roll_back
from tests.release.release_scenes import counted_out, on_trial, serving

HOSTILE = "<script>alert(1)</script>\u202egnp.exe"


def test_endpoints_page_shows_split_and_step(tmp_path: Path) -> None:
    with serving_console(tmp_path, on_trial().context) as console:
        page = console.show("/")
    assert 'href="/endpoints/digits"' in page
    assert "v3 10 %" in page
    assert "v2 90 %" in page
    assert '<li aria-current="step">10 %' in page


def test_endpoints_page_shows_pending_rollback(tmp_path: Path) -> None:
    scene = serving("a", "b")
    scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        scene.roll_back()
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/")
    assert "rollback pending" in page
    assert "to v1" in page
    assert "cannot be reached" in page


def test_endpoints_page_shows_replica_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = (
        EndpointServer(name="r1", state="reports", table="7", age_s=1.0),
        EndpointServer(name="r2", state="silent", table="6", age_s=90.0),
    )
    monkeypatch.setattr(FakeProvider, "list_servers", lambda *_: servers)
    with serving_console(tmp_path, serving("a").context) as console:
        overview, page = console.show("/"), console.show("/endpoints/digits")
    assert "1 reports, 1 silent" in overview.replace("\n", "")
    assert "90 s ago" in page


def test_endpoint_page_of_canary_shows_evidence_and_commands(tmp_path: Path) -> None:
    scene = counted_out(bad=False)
    scene.reconcile_some()
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/endpoints/digits")
    assert "Rollout in progress" in page
    assert "Evidence against the candidate" in page
    assert "Share of the candidate" in page
    assert "of 1000" in page
    for command in ("rollout pause", "rollout advance", "rollout abort"):
        assert page.count(f"onnx-ops {command} digits --reason") == 2
    assert "rollout resume" not in page
    assert "--dry-run" in page


def test_endpoint_page_of_paused_rollout_offers_resume_instead_of_pause(tmp_path: Path) -> None:
    scene = counted_out(bad=False)
    scene.reconcile_some()
    send_command(scene.context, "digits", OperatorCommand.PAUSE, reason="look at it")
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/endpoints/digits")
    assert page.count("onnx-ops rollout resume digits --reason") == 2
    assert "rollout pause" not in page


def test_endpoint_page_after_rollback_shows_aborted_rollout_and_reason(tmp_path: Path) -> None:
    scene = counted_out(bad=True)
    scene.reconcile_some()
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/endpoints/digits")
    assert "was aborted" in page
    assert "the last to 0 %" in page
    assert "ROLL BACK" in page


def test_endpoint_page_without_rollout_offers_rollback(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a", "b").context) as console:
        page = console.show("/endpoints/digits")
    assert "onnx-ops rollback digits --reason" in page


def test_page_of_unknown_endpoint_or_path_returns_404(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a").context) as console:
        assert console.ask("/endpoints/nothing").status == 404
        assert console.ask("/history?endpoint=nothing").status == 404
        assert console.ask("/nothing").status == 404


@pytest.mark.parametrize("skip", ["", "0" * 5000, "-1", "²", "1.5"])
def test_history_page_with_zero_or_invalid_skip_shows_newest_entries(
    console: Console, skip: str
) -> None:
    assert "first-deployment" in console.show(f"/history?skip={quote(skip)}")


@pytest.mark.parametrize("skip", ["10000001", "9" * 5000, "0" * 5000 + "10000000"])
def test_history_page_with_huge_skip_shows_no_entries(console: Console, skip: str) -> None:
    page = console.show(f"/history?skip={skip}")
    assert "No entries." in page
    assert "skip=9999900" in page


def test_history_page_shows_signatures_and_folds_long_reasons(tmp_path: Path) -> None:
    with on_disk(tmp_path):
        scene = on_trial()
        roll_back(scene.context, "digits", reason="x" * 10_000, candidate_only=True)
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/history?endpoint=digits")
    assert "✓ verified" in page
    assert "not needed" in page
    assert '<details class="long">' in page
    assert "x" * 10_000 in page


@pytest.mark.parametrize(("damaged", "is_state_lost"), [(4, False), (-1, True)])
def test_pages_of_damaged_ledger_show_error_and_intact_entries(
    tmp_path: Path, damaged: int, is_state_lost: bool
) -> None:
    with on_disk(tmp_path):
        scene = on_trial()
    entries = sorted((tmp_path / ".onnx-ops" / "ledger" / "digits").glob("*.jsonl"))
    entries[damaged].write_bytes(entries[damaged].read_bytes()[:50] + b"#\n")
    scene.restart()
    with serving_console(tmp_path, scene.context) as console:
        history, overview = console.show("/history"), console.show("/")
        page = console.show("/endpoints/digits")
    assert "ledger-damaged" in history
    assert "bound to digits on cpu" in history
    assert ("cannot be read" in overview) is is_state_lost
    assert "ledger-damaged" in page
    assert "Traceback" not in history + overview + page


@pytest.mark.parametrize("is_adopted", [False, True])
def test_endpoint_page_with_damaged_start_of_ledger_reports_that_rollout_cannot_be_shown(
    tmp_path: Path, is_adopted: bool
) -> None:
    with on_disk(tmp_path):
        scene = on_trial()
    first = min((tmp_path / ".onnx-ops" / "ledger" / "digits").glob("*.jsonl"))
    first.write_bytes(first.read_bytes()[:50] + b"#\n")
    scene.restart()
    if is_adopted:
        adopt(scene.context, find_adoption(scene.context, "digits"))
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/endpoints/digits")
    assert ("the ledger is damaged" in page) is not is_adopted
    assert "The last rollout cannot be shown" in page
    assert "No rollout to show" not in page


def test_pages_show_hostile_reason_as_text(tmp_path: Path) -> None:
    scene = serving("a", "b")
    roll_back(scene.context, "digits", reason=HOSTILE, actor=HOSTILE)
    with serving_console(tmp_path, scene.context) as console:
        pages = [console.show(path) for path in ("/history", "/endpoints/digits", "/")]
    for page in pages:
        assert "<script>alert" not in page
        assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u202e" in pages[0]


def test_page_with_failing_endpoint_shows_other_endpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    scene.bind("good")
    scene.bind("bad")
    scene.promote(scene.publish("a"))
    scene.reconcile_all()
    observe = FakeProvider.observe

    def fail(provider: FakeProvider, config: EndpointConfig) -> EndpointState | None:
        if config.endpoint == "bad":
            raise RuntimeError("a fault")
        return observe(provider, config)

    monkeypatch.setattr(FakeProvider, "observe", fail)
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/")
    assert "v1 100 %" in page
    assert "RuntimeError: a fault" in page


def test_snapshot_during_unanswered_request_sends_no_second_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = SnapshotReader(serving("a").context)
    reader._busy.add("digits")
    monkeypatch.setattr(FakeProvider, "observe", lambda *_: pytest.fail("was asked"))
    reading = reader.read().endpoints["digits"]
    assert reading.error is not None
    assert "was not read within" in reading.error.what


def test_snapshot_revision_changes_with_ledger_but_not_with_time() -> None:
    scene = on_trial()
    reader = SnapshotReader(scene.context)
    first = reader.read().revision
    scene.world.clock.advance(5.0)
    assert reader.read().revision == first
    scene.say(OperatorCommand.PAUSE)
    assert reader.read().revision != first


def test_releases_page_lists_versions_with_aliases(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a", "b").context) as console:
        page = console.show("/releases")
    assert 'href="/releases/digits/2"' in page
    assert "champion-cpu" in page


def test_releases_page_without_registry_shows_its_error(tmp_path: Path) -> None:
    scene = serving("a")
    scene.world.registry.down = True
    with serving_console(tmp_path, scene.context) as console:
        page = console.show("/releases")
        version = console.show("/releases/digits/1")
    assert "the registry cannot be read" in page
    assert "the version or its report cannot be read" in version


def test_release_page_shows_decision_problem_and_promotion(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a").context) as console:
        page = console.show("/releases/digits/1")
    assert "onnx-ops promote digits/1 --target cpu" in page
    assert "cannot be judged again" in page


def test_page_of_unknown_release_returns_404(tmp_path: Path) -> None:
    with serving_console(tmp_path, serving("a").context) as console:
        missing = [console.ask(f"/releases/{name}/9").status for name in ("digits", "other")]
    assert missing == [404, 404]


def test_release_page_shows_gates_of_verified_decision_and_report(tmp_path: Path) -> None:
    scene = serving("a")
    report = "<p>report</p><script>alert(1)</script>"
    number = publish_with_evidence(scene.world, tmp_path, report=report)
    with serving_console(tmp_path, scene.context) as console:
        page = console.show(f"/releases/digits/{number}")
        stored = console.ask(f"/reports/digits/{number}")
    assert "✓ verified" in page
    assert "the same verdicts" in page
    assert "onnx-ops promote" not in page, "the decision is FAIL"
    assert "parity" in page
    assert f'src="/reports/digits/{number}"' in page
    assert "alert(1)" not in page
    assert stored.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert stored.text == report


def test_targets_page_lists_profiles_and_pools(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "targets"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("nothing: here\n")
    with serving_console(tmp_path, serving("a").context) as console:
        page = console.show("/targets")
    assert "cpu-1t" in page
    assert "broken" in page
    assert "no worker is running" in page
    assert "benchmark/fp32" in page


def test_endpoint_page_without_provider_shows_error_and_recorded_state(tmp_path: Path) -> None:
    scene = serving("a")
    broken = replace(scene.context, provider=scene.context.exporter)  # type: ignore[arg-type]
    with serving_console(tmp_path, broken) as console:
        page = console.show("/endpoints/digits")
    assert "there is no fake called fake" in page
    assert "v1" in page


def test_pages_of_release_with_unreadable_ledger_show_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ServiceUnavailableError("the ledger does not answer")

    context = serving("a").context
    monkeypatch.setattr(snapshot, "list_bound_endpoints", fail)
    with serving_console(tmp_path, context) as console:
        page = console.show("/releases/digits/1")
        releases = console.show("/releases")
        assert console.ask("/reports/digits/1").status == 503
    assert "the ledger does not answer" in page
    assert "the ledger does not answer" in releases
    assert "No models to show" not in releases
