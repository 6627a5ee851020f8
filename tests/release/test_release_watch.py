"""The watch: cheap passes, independent endpoints, and an intermittent registry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import pytest

from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from onnx_ops.errors import RefusedError
from onnx_ops.ports import EndpointProvider, Ledger, ModelFiles, Registry
from onnx_ops.release.journal import Journal
from onnx_ops.release.reconcile import StepReport, find_step, reconcile_until_stable
from onnx_ops.release.reconcile_pass import ReconcilePass, RegistrySnapshot, read_registry
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from tests.release.release_parts import CANARY, CHALLENGER, CHAMPION, PREVIOUS, Scene, config_of
from tests.release.release_scenes import (
    asked_for,
    counted_out,
    lost,
    misled,
    moved_by_hand,
    on_trial,
    pair,
    past_its_time,
    serving,
    with_candidate,
    withdrawn,
)
from tests.support.golden import Golden


class Counting:
    """A port that records the names of its calls."""

    def __init__(self, port: object) -> None:
        self._port = port
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.asked.append(name)
            return method(*arguments, **options)

        return call


@dataclass
class Watch:
    scene: Scene
    events: list[WatchEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = Counting(self.scene.world.registry)
        self.context = replace(self.scene.context, registry=lambda: cast("Registry", self.registry))
        self.queue = ReconcileQueue()
        self.watcher = WatchLoop(
            self.context, self.queue, interval_s=5.0, on_event=self.events.append
        )

    def look(self) -> list[str]:
        """Make one pass, and return the calls of the registry."""
        self.registry.asked.clear()
        self.watcher.reconcile_all()
        return list(self.registry.asked)

    def kinds(self) -> list[WatchEventKind]:
        found = [report.kind for report in self.events]
        self.events.clear()
        return found


def fleet(count: int) -> Scene:
    scene = Scene()
    names = [f"digits-{number}" for number in range(count)]
    for name in names:
        scene.bind(name)
    scene.promote(scene.publish("a"))
    scene.reconcile_all()
    return scene


@pytest.mark.parametrize("count", [1, 7])
def test_watch_loop_pass_without_changes_sends_one_registry_request(count: int) -> None:
    watch = Watch(fleet(count))
    assert watch.look() == ["all_aliases"]
    assert watch.kinds() == [WatchEventKind.WAITING] * count
    assert watch.look() == ["all_aliases"]
    assert watch.kinds() == []


@pytest.mark.parametrize(
    ("scene", "weights"), [(lost, {"v2": 90, "v3": 10}), (past_its_time, {"v2": 100})]
)
def test_watch_loop_pass_without_alias_change_restores_and_cleans_up(
    scene: Any, weights: Mapping[str, int]
) -> None:
    watch = Watch(scene())
    watch.look()
    assert watch.scene.traffic() == weights
    assert WatchEventKind.STEP in watch.kinds()


def test_watch_loop_without_registry_restores_lost_endpoint() -> None:
    watch = Watch(serving("a", "b"))
    watch.look()
    watch.scene.world.registry.down = True
    watch.scene.world.provider.interfere("digits", None)
    watch.look()
    assert watch.scene.traffic() == {"v2": 100, "v1": 0}


def test_watch_loop_during_registry_outage_backs_off_and_reports_once() -> None:
    watch = Watch(serving("a"))
    watch.scene.world.registry.down = True
    asked = [len(watch.look()) for _ in range(30)]
    assert [number for number, count in enumerate(asked) if count] == [0, 1, 3, 7, 15, 27]
    assert max(asked) == 1
    assert watch.kinds().count(WatchEventKind.REGISTRY_DOWN) == 1
    watch.scene.world.registry.down = False
    for _ in range(12):
        watch.look()
    assert watch.kinds().count(WatchEventKind.REGISTRY_BACK) == 1
    assert watch.look() == ["all_aliases"]


def test_watch_loop_with_unapproved_alias_restores_it_and_reports_reason(golden: Golden) -> None:
    scene = misled(CHAMPION)
    watch = Watch(scene)
    watch.look()
    assert scene.aliases()[CHAMPION] == "1"
    (refused,) = [report for report in watch.events if report.kind is WatchEventKind.REFUSED]
    golden("reasons", refused.why)
    assert "is FAIL" in scene.record("2").tags[f"onnxops.rejected.{CHAMPION}"]
    assert scene.traffic() == {"v1": 100}


def test_watch_loop_with_failing_endpoint_reconciles_others() -> None:
    scene = fleet(2)
    watch = Watch(scene)
    scene.promote(scene.publish("b"))
    provider = scene.world.provider
    apply = provider.apply

    def broken(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        if config.endpoint == "digits-0":
            raise ZeroDivisionError("a bug")
        apply(config, state, generation=generation)

    provider.apply = broken  # type: ignore[method-assign]
    watch.look()
    assert scene.traffic("digits-1") == {"v2": 100, "v1": 0}
    assert scene.traffic("digits-0") == {"v1": 100}
    assert [r.why for r in watch.events if r.kind is WatchEventKind.TROUBLE] == [
        "unexpected: ZeroDivisionError: a bug"
    ]


def test_watch_loop_without_ledger_access_reports_once_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(serving("a"))

    def gone() -> tuple[str, ...]:
        raise RuntimeError("no such bucket")

    monkeypatch.setattr(watch.scene.world.ledger, "endpoints", gone)
    for _ in range(3):
        watch.look()
    assert watch.kinds() == [WatchEventKind.TROUBLE]
    monkeypatch.undo()
    watch.look()
    assert watch.kinds() == [WatchEventKind.WAITING]


def test_watch_loop_with_vetoed_alias_restores_lost_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = with_candidate(serving("a"))
    scene.promote("2")

    def vetoed(model: str, alias: str, version: str) -> None:
        raise RefusedError("MLflow refused", where=alias)

    monkeypatch.setattr(scene.world.registry, "set_alias", vetoed)
    watch = Watch(scene)
    watch.look()
    scene.world.provider.interfere("digits", None)
    watch.look()
    assert scene.traffic() == {"v2": 100, "v1": 0}
    troubles = {report.why for report in watch.events if report.kind is WatchEventKind.TROUBLE}
    assert troubles == {f"{PREVIOUS}: MLflow refused"}
    monkeypatch.undo()
    watch.look()
    watch.look()
    assert scene.aliases()[CHAMPION] == "2"


def test_watch_loop_of_unreachable_endpoint_limits_ledger_entries() -> None:
    scene = with_candidate(serving("a"))
    scene.promote("2")
    scene.world.provider.interfere("digits", None)
    scene.world.provider.down = True
    watch = Watch(scene)
    before = len(scene.world.ledger.read("digits"))
    for _ in range(120):
        watch.look()
    assert len(scene.world.ledger.read("digits")) - before <= 2 * 14
    assert watch.kinds().count(WatchEventKind.TROUBLE) == 1
    scene.world.provider.down = False
    for _ in range(13):
        watch.look()
    assert scene.traffic() == {"v2": 100, "v1": 0}


def test_reconcile_models_reconciles_only_endpoints_of_named_models() -> None:
    scene = with_candidate(serving("a"))
    watch = Watch(scene)
    watch.look()
    scene.set_alias(CHALLENGER, "2")
    watch.registry.asked.clear()
    watch.watcher.reconcile_models(frozenset({"another", "nobody's"}))
    assert watch.registry.asked == []
    watch.watcher.reconcile_models(frozenset({"digits", "another"}))
    assert watch.registry.asked[0] == "aliases"
    assert "all_aliases" not in watch.registry.asked
    assert scene.traffic() == {"v2": 100, "v1": 0}


def test_watch_loop_closed_during_step_stops_after_current_effect() -> None:
    scene = with_candidate(serving("a"))
    scene.promote("2")
    queue = ReconcileQueue()

    def stop(report: WatchEvent) -> None:
        if report.did:
            queue.close()

    WatchLoop(scene.context, queue, interval_s=5.0, on_event=stop).run()
    state = scene.state()
    assert (state.open_intent, scene.traffic()) == (None, {"v2": 100, "v1": 0})
    assert state.pending_aliases
    scene.reconcile_all()
    assert scene.aliases()[CHAMPION] == "2"


def test_watch_loop_with_queued_model_reconciles_without_delay() -> None:
    scene = with_candidate(serving("a"))
    queue, served = ReconcileQueue(), threading.Event()

    def events(report: WatchEvent) -> None:
        if report.did == "finish":
            served.set()

    watcher = WatchLoop(scene.context, queue, interval_s=3600.0, on_event=events)
    watcher.reconcile_all()
    thread = threading.Thread(target=watcher.run)
    thread.start()
    scene.set_alias(CHALLENGER, "2")
    queue.add("digits")
    assert served.wait(30)
    queue.close()
    thread.join(30)
    assert not thread.is_alive()


def test_reconcile_queue_keeps_at_most_1000_names() -> None:
    queue = ReconcileQueue()
    for number in range(5000):
        queue.add(f"m-{number}")
        queue.add("m-0")
    assert len(queue.wait(0.0)) == 1000
    assert queue.wait(0.0) == frozenset()


def test_reconcile_pass_without_due_change_keeps_ledger() -> None:
    scene = with_candidate(serving("a"))
    scene.bind("digits", policy=CANARY)
    before = len(scene.world.ledger.read("digits"))
    events: list[StepReport] = []
    assert (
        ReconcilePass(scene.context, lambda: read_registry(scene.context))
        .reconcile("digits", on_step=events.append)[-1]
        .stable
    )
    assert len(events) == 1
    assert len(scene.world.ledger.read("digits")) == before
    assert ReconcilePass(scene.context, lambda: read_registry(scene.context)).state(
        "digits"
    ).config == config_of("digits")


def test_reconcile_pass_with_outdated_state_reads_ledger_again() -> None:
    scene = with_candidate(serving("a"))
    reconcile_pass = ReconcilePass(scene.context, lambda: read_registry(scene.context))
    reconcile_pass.state("digits")
    scene.set_alias(CHALLENGER, "2")
    reconcile_until_stable(scene.context, "digits", actor="another process")
    assert [(report.did, report.stable) for report in reconcile_pass.reconcile("digits")] == [
        ("", True)
    ]


def test_reconcile_pass_with_waiting_aliases_sends_one_registry_request() -> None:
    watch = Watch(pair())
    reports = ReconcilePass(watch.context, lambda: read_registry(watch.context)).reconcile(
        "digits-a"
    )
    assert [(report.did, report.stable) for report in reports] == [("", True)]
    assert watch.scene.state("digits-a").pending_aliases
    assert watch.registry.asked == ["all_aliases"]


@pytest.mark.parametrize(
    "setup",
    [
        asked_for,
        partial(counted_out, bad=True),
        lost,
        partial(misled, CHAMPION),
        moved_by_hand,
        on_trial,
        pair,
        past_its_time,
        withdrawn,
    ],
)
def test_find_step_with_due_change_writes_nothing(setup: Callable[[], Scene]) -> None:
    scene = setup()
    ledger, files = Counting(scene.world.ledger), Counting(scene.context.files)
    registry, provider = Counting(scene.world.registry), Counting(scene.world.provider)
    context = replace(
        scene.context,
        open_ledger=lambda: cast("Ledger", ledger),
        files=cast("ModelFiles", files),
        registry=lambda: cast("Registry", registry),
        provider=lambda name: cast("EndpointProvider", provider),
    )
    for endpoint in scene.world.ledger.endpoints():
        if "@" not in endpoint:
            find_step(Journal.open(context, endpoint), scene.world.registry.aliases)
    assert {*ledger.asked} <= {"state", "endpoints", "read_intact"}
    assert {*provider.asked} <= {"observe", "capabilities", "confirm_rollout"}
    assert (registry.asked, files.asked) == ([], [])


def test_read_registry_after_refusal_reports_registry_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = serving("a")

    def forbidden() -> Mapping[str, Mapping[str, str]]:
        raise RefusedError("MLflow refused", where="all models")

    monkeypatch.setattr(scene.world.registry, "all_aliases", forbidden)
    assert read_registry(scene.context) == RegistrySnapshot(
        aliases={}, down="all models: MLflow refused"
    )
