"""A damaged ledger stops only its own endpoint."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.cli.main import app
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.errors import CorruptStateError
from onnx_ops.ports import Context
from onnx_ops.release.journal import find_corruption, list_bound_endpoints
from onnx_ops.release.notify import DeliveryResult, NotificationLoop
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.prune import plan_pruning
from onnx_ops.release.reconcile import reconcile_each, reconcile_until_stable
from onnx_ops.release.rollback import roll_back_each, select_endpoints
from onnx_ops.release.status import HistoryFilter, filter_endpoints, read_history, read_statuses
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from onnx_ops.testing.fakes import FakeNotifier, FakeSigner, FakeWorld, make_ledger_keys
from tests.release.release_parts import (
    CHALLENGER,
    CHAMPION,
    MODEL,
    PREVIOUS,
    Scene,
    config_of,
    roll_back,
)

FACES = replace(config_of("faces"), provider="local", model="faces", target="gpu")


class Site:
    """Endpoints on a real folder of ledgers.

    `digits` is bound to one model, and `faces` and `faces-eu` to another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scene = Scene(
            world=FakeWorld(ledger=ObjectLedger(LocalObjects(folder), make_ledger_keys()))
        )
        self.scene.bind("digits")
        for name in ("faces", "faces-eu"):
            bind_endpoint(self.scene.context, replace(FACES, endpoint=name), RolloutPolicy())

    def serve(self, *seeds: str) -> None:
        for seed in seeds:
            self.scene.serve(self.scene.publish(seed))

    def break_entry(self, endpoint: str, number: int) -> None:
        """Damage an entry, and delete the snapshot, which could replace it."""
        path = self.folder / endpoint / f"{number:08d}.jsonl"
        path.write_bytes(path.read_bytes()[:40])
        path.with_name("snapshot.json").unlink(missing_ok=True)

    def last(self, endpoint: str) -> int:
        return len(list((self.folder / endpoint).glob("0*.jsonl")))

    @property
    def context(self) -> Context:
        """Return the context of another process, which has cached no entry."""
        ledger = ObjectLedger(LocalObjects(self.folder), make_ledger_keys())
        return replace(self.scene.context, open_ledger=lambda: ledger)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_damaged_old_entry_permits_rollback_and_is_reported_by_history(site: Site) -> None:
    site.serve("a", "b")
    path = site.folder / "digits" / "00000002.jsonl"
    path.write_bytes(path.read_bytes()[:40])
    assert roll_back(site.context, "digits").moved_to == "v1"
    _, errors = read_history(site.context, HistoryFilter(endpoints=("digits",)))
    assert set(errors) == {"digits"}


@pytest.mark.parametrize("number", [1, 2], ids=["nothing of it can be read", "a part can be read"])
def test_pending_aliases_beside_damaged_ledger_of_other_model_are_written(
    site: Site, number: int
) -> None:
    site.serve("a", "b")
    site.scene.world.registry.down = True
    roll_back(site.context, "digits")
    site.scene.world.registry.down = False
    bind_endpoint(site.scene.context, FACES, RolloutPolicy(steps=(0.5, 1.0)))
    site.break_entry("faces", number)
    assert reconcile_until_stable(site.context, "digits")[-1].stable
    assert site.scene.aliases()[CHAMPION] == "1"
    with pytest.raises(CorruptStateError, match="not JSON"):
        reconcile_until_stable(site.context, "faces")


def test_roll_back_beside_damaged_ledger_of_other_endpoint_succeeds(site: Site) -> None:
    site.serve("a", "b")
    site.break_entry("faces", 1)
    assert roll_back(site.context, "digits").moved_to == "v1"
    assert site.scene.traffic()["v1"] == 100


def test_reconcile_each_with_one_damaged_ledger_moves_other_endpoints(site: Site) -> None:
    site.serve("a")
    site.scene.promote(site.scene.publish("b"))
    site.break_entry("faces", 1)
    names = list_bound_endpoints(site.context)
    assert names == ("digits", "faces", "faces-eu")
    reports, errors = reconcile_each(site.context, names)
    assert (set(reports), set(errors)) == ({"digits", "faces-eu"}, {"faces"})
    assert site.scene.traffic()["v2"] == 100


def test_read_statuses_with_one_damaged_ledger_returns_other_endpoints(site: Site) -> None:
    site.serve("a")
    site.break_entry("faces", 1)
    found, untold = read_statuses(site.context, filter_endpoints(site.context, HistoryFilter()))
    assert [one.state.endpoint for one in found] == ["digits", "faces-eu"]
    assert isinstance(untold["faces"], CorruptStateError)


def test_watch_loop_with_one_damaged_ledger_reconciles_other_endpoints(site: Site) -> None:
    site.serve("a")
    site.scene.promote(site.scene.publish("b"))
    site.break_entry("faces", 1)
    reports: list[WatchEvent] = []
    WatchLoop(
        site.context,
        ReconcileQueue(),
        interval_s=5.0,
        endpoints=(),
        actor="",
        on_event=reports.append,
    ).reconcile_all()
    assert site.scene.aliases()[CHAMPION] == "2"
    trouble = [
        (one.endpoint, "not JSON" in one.why)
        for one in reports
        if one.kind is WatchEventKind.TROUBLE
    ]
    assert trouble == [("faces", True)]


@pytest.fixture
def pair(site: Site) -> Site:
    """Return two endpoints of one model on version 2.

    The ledger of the second one is then damaged at its end.
    """
    site.scene.bind("digits-eu")
    for seed in ("a", "b"):
        site.scene.world.clock.advance(DAY)
        site.scene.promote(site.scene.publish(seed))
        for name in ("digits", "digits-eu", "digits", "digits-eu"):
            site.scene.reconcile(name)
    site.break_entry("digits-eu", site.last("digits-eu"))
    return site


def test_champion_alias_beside_damaged_ledger_follows_observed_traffic(pair: Site) -> None:
    scene = pair.scene
    assert scene.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    scene.world.registry.down = True
    roll_back(pair.context, "digits", pin=False)
    scene.world.registry.down = False
    provider = scene.world.provider
    its_own, back = (provider.observe(config_of(name)) for name in ("digits-eu", "digits"))
    # The endpoint shows version 2, then no version, then version 1.
    for shown, champion in (
        (its_own, "2"),
        (None, "2"),
        (back, "1"),
    ):
        provider.interfere("digits-eu", shown)
        reconcile_until_stable(pair.context, "digits")
        assert scene.aliases()[CHAMPION] == champion
    assert CHALLENGER not in scene.aliases()


def test_roll_back_beside_damaged_ledger_of_sibling_keeps_champion_alias(pair: Site) -> None:
    assert roll_back(pair.context, "digits").pending_aliases == ()
    reconcile_until_stable(pair.context, "digits")
    assert pair.scene.aliases()[CHAMPION] == "2"


def test_roll_back_each_with_damaged_ledger_moves_others_and_returns_error(pair: Site) -> None:
    names = select_endpoints(pair.context, (), every=True, model=MODEL)
    assert names == ("digits", "digits-eu")
    moved, errors = roll_back_each(pair.context, names, pin=False)
    assert (set(moved), set(errors)) == ({"digits"}, {"digits-eu"})
    assert pair.scene.traffic("digits")["v1"] == 100


def test_plan_pruning_with_damaged_ledger_raises_corrupt_state_error(pair: Site) -> None:
    pair.scene.world.clock.advance(90 * DAY)
    with pytest.raises(CorruptStateError):
        plan_pruning(pair.context, [MODEL], keep=0, older_than_s=DAY)


def test_notification_loop_with_damaged_ledger_notifies_about_others(site: Site) -> None:
    people = FakeNotifier()
    site.scene.world.notifiers["chat"] = people
    site.serve("a", "b")
    roll_back(site.context, "digits")
    site.break_entry("faces", 1)
    reports: list[DeliveryResult] = []
    loop = NotificationLoop(
        site.context,
        interval_s=5.0,
        endpoints=lambda: ("faces", "digits"),
        on_result=reports.append,
    )
    loop.send_all()
    loop.send_all()
    assert people.received
    assert [one.endpoint for one in reports if one.error] == ["faces"]
    stopped = threading.Event()
    stopped.set()
    loop.run(stopped)


def make_project(root: Path) -> Site:
    """Return the site of a project that trusts the key of its ledgers."""
    keys = root / ".onnx-ops" / "keys"
    keys.mkdir(parents=True)
    (keys / "release.pub.pem").write_bytes(FakeSigner().public_pem())
    return Site(root / ".onnx-ops" / "ledger")


def test_status_and_history_commands_with_damaged_ledger_exit_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = make_project(tmp_path)
    site.break_entry("faces", 1)
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))
    result = CliRunner().invoke(app, ["status", "--json"])
    assert result.exit_code == 4
    reports = {one["endpoint"]: one for one in json.loads(capfd.readouterr().out)}
    assert reports["faces"]["error"] == "CorruptStateError"
    assert reports["faces-eu"]["config"]["model"] == "faces"
    for command in ("status", "history"):
        result = CliRunner().invoke(app, [command])
        assert result.exit_code == 4
        assert "error: ledger faces/00000001.jsonl: not JSON" in result.output
        assert "faces-eu" in result.output


def test_history_of_damaged_ledger_lists_entries_before_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = make_project(tmp_path)
    site.serve("a")
    site.break_entry("digits", 3)
    site.break_entry("faces", 1)
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))
    assert CliRunner().invoke(app, ["history", "digits", "--json"]).exit_code == 4
    *lines, error = json.loads(capfd.readouterr().out)
    assert [line["sequence"] for line in lines] == [1, 2]
    assert (error["endpoint"], error["error"]) == ("digits", "CorruptStateError")
    lines_of_model, errors = read_history(site.context, HistoryFilter(model="other"))
    assert lines_of_model == ()
    # The binding of `faces` is lost.
    assert list(errors) == ["faces"]


def test_read_intact_of_damaged_ledger_returns_entries_before_damage(site: Site) -> None:
    site.serve("a")
    whole = site.context.ledger.read("digits")
    assert site.context.ledger.read_intact("digits") == whole
    site.break_entry("digits", 3)
    assert site.context.ledger.read_intact("digits") == whole[:2]


def test_find_corruption_returns_error_for_damaged_ledger_only(site: Site) -> None:
    site.serve("a")
    site.break_entry("digits", 3)
    assert isinstance(find_corruption(site.context, "digits"), CorruptStateError)
    assert find_corruption(site.context, "faces") is None


def test_notification_loop_with_damage_before_and_after_repair_reports_both(site: Site) -> None:
    site.scene.world.notifiers["chat"] = FakeNotifier()
    reports: list[DeliveryResult] = []
    loop = NotificationLoop(
        site.context, interval_s=5.0, endpoints=lambda: ("faces",), on_result=reports.append
    )
    path = site.folder / "faces" / "00000001.jsonl"
    whole = path.read_bytes()
    for _ in range(2):
        site.break_entry("faces", 1)
        loop.send_all()
        path.write_bytes(whole)
        loop.send_all()
    assert [one.endpoint for one in reports if one.error] == ["faces", "faces"]
