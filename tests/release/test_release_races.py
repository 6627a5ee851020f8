"""Concurrent writers of the ledger.

A writer that loses the race for the next entry reads again. No command fails because another writer
was faster.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.artifact import digest_bytes
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
from onnx_ops.release.journal import MAX_CONFLICT_ATTEMPTS, Journal, list_bound_endpoints
from onnx_ops.release.promote import delete_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.testing.fakes import FakeWorld, make_ledger_keys
from tests.release.release_parts import AT_ONCE, CHAMPION, PREVIOUS, Scene
from tests.release.release_scenes import (
    end_of,
    on_trial,
    rolled_back_alone,
    serving,
    with_candidate,
)
from tests.support.faults import Faults

DRIVERS = 4


def beside(
    prepare: Callable[[], Scene],
    other: Callable[[Context], object],
    command: Callable[[Scene], object],
) -> list[Scene]:
    """Return the scenes after a command that another process interrupts once.

    There is one scene for every moment of the command.
    """
    scenes: list[Scene] = []
    counted = Faults()
    while not scenes or len(scenes) < counted.moments:
        scene, moment = prepare(), len(scenes)
        process = scene.world.context("other")

        def act(at: int, moment: int = moment, process: Context = process) -> None:
            if at == moment:
                other(process)

        scene.faults = counted = Faults(between=act)
        command(scene)
        scene.faults = None
        scenes.append(scene)
    return scenes


def drive(context: Context) -> None:
    if list_bound_endpoints(context):
        reconcile_until_stable(context, "digits")


def writing(body: EntryBody, stream: str = "digits") -> Callable[[Context], object]:
    return lambda context: Journal.open(context, stream).append(body)


SPEAK = writing(OperatorCommandSent(command=OperatorCommand.PAUSE, reason="let me look"))


def test_reconcile_beside_second_reconciler_ends_in_same_state() -> None:
    alone = rolled_back_alone()
    alone.reconcile()
    scenes = beside(rolled_back_alone, drive, Scene.reconcile)
    assert len(scenes) > 10
    assert [end_of(scene) for scene in scenes] == [end_of(alone)] * len(scenes)


def test_concurrent_reconcilers_on_one_ledger_folder_write_aliases(tmp_path: Path) -> None:
    scene = Scene(world=FakeWorld(ledger=ObjectLedger(LocalObjects(tmp_path), make_ledger_keys())))
    scene.bind()
    for seed in ("a", "b"):
        scene.serve(scene.publish(seed))
    for turn in range(5):
        scene.world.registry.down = True
        scene.roll_back(force=turn > 0, to="1" if turn % 2 == 0 else "2")
        scene.world.registry.down = False
        context = [
            replace(
                scene.world, ledger=ObjectLedger(LocalObjects(tmp_path), make_ledger_keys())
            ).context(f"driver {n}")
            for n in range(DRIVERS)
        ]
        with ThreadPoolExecutor(DRIVERS) as pool:
            found = list(pool.map(lambda one: reconcile_until_stable(one, "digits"), context))
        assert all(reports[-1].stable for reports in found)
        assert scene.aliases()[CHAMPION] == ("1" if turn % 2 == 0 else "2")


def test_reconcile_with_endless_conflicts_raises_ledger_conflict_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = rolled_back_alone()
    ledger = type(scene.world.ledger)
    append = ledger.append
    asked: list[int] = []

    def overtaken(self: Any, entry: LedgerEntry) -> None:
        """Let another process write just before each of the command's entries."""
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


def test_send_command_beside_other_writer_is_recorded() -> None:
    write = writing(ThresholdsFixed(candidate=digest_bytes(b"1"), thresholds=None))
    scenes = beside(on_trial, write, lambda scene: scene.say(OperatorCommand.PAUSE))
    assert {scene.state().command for scene in scenes} == {OperatorCommand.PAUSE}


def test_rebind_beside_operator_command_records_both() -> None:
    scenes = beside(on_trial, SPEAK, lambda scene: scene.bind(policy=AT_ONCE))
    assert len(scenes) > 3
    for scene in scenes:
        assert (scene.state().policy, scene.state().command) == (AT_ONCE, OperatorCommand.PAUSE)


def test_override_with_concurrent_operator_command_is_recorded_once() -> None:
    scenes = beside(
        lambda: with_candidate(on_trial(), verdict=Verdict.FAIL),
        SPEAK,
        lambda scene: scene.promote("2", override=True, reason="by hand"),
    )
    assert len(scenes) > 6
    for scene in scenes:
        given = [
            entry.body
            for entry in scene.world.ledger.read("digits")
            if isinstance(entry.body, OverrideRecorded)
        ]
        assert [(one.version, one.reason) for one in given] == [("2", "by hand")]


def test_promote_without_endpoint_beside_other_writer_sets_champion() -> None:
    write = writing(AliasesWritten(aliases={"x": "1"}), "digits@cpu")
    scenes = beside(lambda: with_candidate(Scene()), write, lambda scene: scene.promote("1"))
    assert len(scenes) > 6
    for scene in scenes:
        assert scene.aliases()[CHAMPION] == "1"
        assert scene.state("digits@cpu").aliases == {CHAMPION: "1", PREVIOUS: None, "x": "1"}


@pytest.mark.parametrize("other", [SPEAK, drive], ids=["operator", "driver"])
def test_delete_endpoint_beside_other_writer_completes_once(
    other: Callable[[Context], object],
) -> None:
    def delete(scene: Scene) -> None:
        delete_endpoint(scene.context, "digits", reason="old")

    scenes = beside(lambda: with_candidate(serving("a", "b")), other, delete)
    assert len(scenes) > 6
    for scene in scenes:
        assert (scene.traffic(), scene.state().config) == ({}, None)
        bodies = [entry.body for entry in scene.world.ledger.read("digits")]
        deletions = [body for body in bodies if isinstance(body, EndpointDeleted)]
        assert [body.reason for body in deletions if not body.done] == ["old"]
        assert [body.done for body in deletions] == [False, True]
