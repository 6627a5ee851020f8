"""Whoever loses the race for the ledger's next entry looks again: no command fails because another one was faster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from release_parts import CHAMPION, Scene, effects
from release_scenes import end_of, on_trial, rolled_back_alone, serving

from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.adapters.objects import LocalObjects
from onnx_ops.domain.ledger import Override
from onnx_ops.domain.rollout import Word
from onnx_ops.errors import Overtaken
from onnx_ops.operations.journal import LOOKS, Journal
from onnx_ops.operations.reconcile import settle
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.faults import Faults

DRIVERS = 4


def test_reconciling_beside_the_background_job_of_a_rollback() -> None:
    """The job writes all the owed aliases at one moment of the command, for every moment."""
    alone = rolled_back_alone()
    alone.settle()
    counted, moment = Faults(), 0
    while moment == 0 or moment < counted.moments:
        scene = rolled_back_alone()
        job = scene.world.ports("background job")
        counted = Faults(between=lambda at, job=job, moment=moment: settle(job, "digits") if at == moment else None)  # type: ignore[misc]
        scene.faults = counted
        assert scene.settle()[-1].settled
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
        ports = [
            replace(scene.world.ports(f"driver {n}"), ledger=ObjectLedger(LocalObjects(tmp_path)))
            for n in range(DRIVERS)
        ]
        with ThreadPoolExecutor(DRIVERS) as pool:
            found = list(pool.map(lambda one: settle(one, "digits"), ports))
        assert all(reports[-1].settled for reports in found)
        assert scene.aliases()[CHAMPION] == ("1" if turn % 2 == 0 else "2")


def test_who_never_gets_an_entry_gives_up() -> None:
    scene = rolled_back_alone()
    asked: list[int] = []

    def overtake(moment: int) -> None:
        """Somebody else writes just before each of the command's own entries."""
        asked.append(moment)
        other = Journal.open(scene.world.ports("other"), "digits")
        other.append(Override(release=scene.record("1").release, version="1", reason="x"))

    scene.faults = Faults(between=overtake)
    before = len(scene.world.ledger.read("digits"))
    with pytest.raises(Overtaken, match="somebody else wrote"):
        scene.settle()
    written = scene.world.ledger.read("digits")[before:]
    assert {type(entry.body) for entry in written} == {Override}
    assert len(asked) >= LOOKS


def test_an_operators_word_is_heard_beside_a_driver() -> None:
    scene = on_trial()
    interrupted: list[int] = []

    def write(moment: int) -> None:
        if moment == 1:  # the ledger was read
            interrupted.append(moment)
            other = Journal.open(scene.world.ports("other"), "digits")
            other.append(Override(release=scene.record("1").release, version="1", reason="x"))

    scene.faults = Faults(between=write)
    scene.say(Word.ABORT)
    scene.faults = None
    assert interrupted == [1]
    assert scene.state().word is Word.ABORT
    scene.settle()
    assert scene.traffic()["v2"] == 100


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
    scene.settle()
    assert scene.traffic()["v1"] == 100
    assert scene.aliases()[CHAMPION] == "1"
