"""A writer that loses the race for the ledger's next entry reads again: no command fails because another was faster."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import (
    AliasesWritten,
    EndpointDeleted,
    EntryBody,
    LedgerEntry,
    OperatorCommandSent,
    OverrideRecorded,
    ThresholdsFixed,
)
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import LedgerConflictError
from onnx_ops.ports import Context
from onnx_ops.release.journal import MAX_CONFLICT_ATTEMPTS, Journal
from onnx_ops.release.promote import delete_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import AT_ONCE, CHAMPION, PREVIOUS, Scene, effects
from tests.release.release_scenes import end_of, on_trial, rolled_back_alone, serving, with_candidate
from tests.support.faults import Faults

DRIVERS = 4


def test_reconciling_beside_the_background_job_of_a_rollback() -> None:
    """The job writes all pending aliases at one moment of the command, for every moment."""
    alone = rolled_back_alone()
    alone.reconcile()
    counted, moment = Faults(), 0
    while moment == 0 or moment < counted.moments:
        scene = rolled_back_alone()
        job = scene.world.context("background job")

        def between(at: int, job: Context = job, moment: int = moment) -> None:
            if at == moment:
                reconcile_until_stable(job, "digits")

        counted = Faults(between=between)
        scene.faults = counted
        assert scene.reconcile()[-1].stable
        assert scene.aliases() == alone.aliases()
        assert end_of(scene)["changes"] == end_of(alone)["changes"]
        assert effects(scene.world.ledger.read("digits")) == effects(alone.world.ledger.read("digits"))
        moment += 1
    assert moment > 10


def test_several_drivers_on_one_folder(tmp_path: Path) -> None:
    scene = Scene(world=FakeWorld(ledger=ObjectLedger(LocalObjects(tmp_path))))
    scene.bind()
    for seed in ("a", "b"):
        scene.serve(scene.publish(seed))
    for turn in range(5):
        scene.world.registry.down = True
        scene.roll_back(force=turn > 0, to="1" if turn % 2 == 0 else "2")
        scene.world.registry.down = False
        context = [
            replace(scene.world.context(f"driver {n}"), ledger=ObjectLedger(LocalObjects(tmp_path)))
            for n in range(DRIVERS)
        ]
        with ThreadPoolExecutor(DRIVERS) as pool:
            found = list(pool.map(lambda one: reconcile_until_stable(one, "digits"), context))
        assert all(reports[-1].stable for reports in found)
        assert scene.aliases()[CHAMPION] == ("1" if turn % 2 == 0 else "2")


def test_who_never_gets_an_entry_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = rolled_back_alone()
    ledger = type(scene.world.ledger)
    append = ledger.append
    asked: list[int] = []

    def overtaken(self: Any, entry: LedgerEntry) -> None:
        """Another process writes just before each of the command's own entries."""
        if not isinstance(entry.body, ThresholdsFixed):
            asked.append(entry.sequence)
            other = Journal.open(scene.world.context("other"), "digits")
            other.append(ThresholdsFixed(candidate=scene.record("1").manifest, thresholds=None))
        append(self, entry)

    before = len(scene.world.ledger.read("digits"))
    monkeypatch.setattr(ledger, "append", overtaken)
    with pytest.raises(LedgerConflictError, match="another writer appended"):
        scene.reconcile()
    written = scene.world.ledger.read("digits")[before:]
    assert {type(entry.body) for entry in written} == {ThresholdsFixed}
    assert len(asked) >= MAX_CONFLICT_ATTEMPTS


def test_an_operators_word_is_heard_beside_a_driver() -> None:
    scene = on_trial()
    interrupted: list[int] = []

    def write(moment: int) -> None:
        if moment == 1:  # the ledger was read
            interrupted.append(moment)
            other = Journal.open(scene.world.context("other"), "digits")
            other.append(ThresholdsFixed(candidate=scene.record("1").manifest, thresholds=None))

    scene.faults = Faults(between=write)
    scene.say(OperatorCommand.PAUSE)
    scene.faults = None
    assert interrupted == [1]
    assert scene.state().command is OperatorCommand.PAUSE


def beside_a_driver(
    prepare: Callable[[], Scene], stream: str, body: EntryBody, command: Callable[[Scene], object]
) -> list[Scene]:
    """What a command leaves when another process writes once while it is at work, for every moment of it."""
    scenes: list[Scene] = []
    counted, moment = Faults(), 0
    while moment == 0 or moment < counted.moments:
        scene = prepare()
        other = scene.world.context("driver")

        def write(at: int, moment: int = moment, other: Context = other) -> None:
            if at == moment:
                Journal.open(other, stream).append(body)

        scene.faults = counted = Faults(between=write)
        command(scene)
        scene.faults = None
        scenes.append(scene)
        moment += 1
    return scenes


SPOKEN = OperatorCommandSent(command=OperatorCommand.PAUSE, reason="let me look")


def test_an_endpoint_is_bound_anew_beside_a_driver() -> None:
    scenes = beside_a_driver(on_trial, "digits", SPOKEN, lambda scene: scene.bind(policy=AT_ONCE))
    assert len(scenes) > 3
    for scene in scenes:
        assert (scene.state().policy, scene.state().command) == (AT_ONCE, OperatorCommand.PAUSE)


def test_an_override_is_given_beside_a_driver() -> None:
    def give(scene: Scene) -> None:
        scene.promote("2", override=True, reason="by hand")

    def prepare() -> Scene:
        return with_candidate(on_trial(), verdict=Verdict.FAIL)

    scenes = beside_a_driver(prepare, "digits", SPOKEN, give)
    assert len(scenes) > 6
    for scene in scenes:
        given = [entry.body for entry in scene.world.ledger.read("digits") if isinstance(entry.body, OverrideRecorded)]
        assert [(one.version, one.reason) for one in given] == [("2", "by hand")]


def test_a_champion_that_nothing_serves_is_told_beside_another() -> None:
    def prepare() -> Scene:
        scene = Scene()
        scene.publish("a")
        return scene

    scenes = beside_a_driver(
        prepare, "digits@cpu", AliasesWritten(aliases={"x": "1"}), lambda scene: scene.promote("1")
    )
    assert len(scenes) > 6
    for scene in scenes:
        assert scene.aliases()[CHAMPION] == "1"
        assert scene.state("digits@cpu").aliases == {CHAMPION: "1", PREVIOUS: None, "x": "1"}


def test_an_endpoint_is_deleted_beside_a_driver() -> None:
    scenes = beside_a_driver(
        lambda: serving("a", "b"),
        "digits",
        SPOKEN,
        lambda scene: delete_endpoint(scene.context, "digits", reason="old"),
    )
    assert len(scenes) > 6
    for scene in scenes:
        assert scene.traffic() == {}
        assert scene.state().config is None
        assert [e.body.reason for e in scene.world.ledger.read("digits") if isinstance(e.body, EndpointDeleted)] == [
            "old"
        ] * 2


def test_a_deletion_that_a_driver_completes_is_done() -> None:
    counted, moment = Faults(), 0
    while moment == 0 or moment < counted.moments:
        scene = serving("a", "b")

        def drive(at: int, moment: int = moment, scene: Scene = scene) -> None:
            if at == moment and scene.state().config is not None:
                reconcile_until_stable(scene.world.context("driver"), "digits")

        scene.faults = counted = Faults(between=drive)
        delete_endpoint(scene.context, "digits")
        assert scene.traffic() == {}
        assert scene.state().config is None
        moment += 1
    assert moment > 6


def test_an_overtaken_driver_does_not_repeat_what_was_rolled_back() -> None:
    """The fence holds: to look again is to see the rollback, not to do the old thing again."""
    scene = serving("a", "b")
    scene.promote(scene.publish("c"))
    apply = scene.world.provider.apply

    def overtaken(*arguments: object, **options: object) -> None:
        scene.world.provider.apply = apply  # type: ignore[method-assign]
        scene.roll_back(to="1")
        apply(*arguments, **options)  # type: ignore[arg-type]

    scene.world.provider.apply = overtaken  # type: ignore[method-assign]
    scene.reconcile()
    assert scene.traffic()["v1"] == 100
    assert scene.aliases()[CHAMPION] == "1"
