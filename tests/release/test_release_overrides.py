"""Overrides that a person gives in the registry.

The tests also cover a veto of the registry's server against the reconciler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from onnx_ops.adapters.ledgers.log import MemoryLedger
from onnx_ops.domain.attestation import override_reason_tag, override_record_tag
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import LedgerEntry, OverrideRecorded
from onnx_ops.errors import RefusedError
from onnx_ops.testing.fakes import FakeProvider, FakeRegistry, FakeSigner, FakeWorld
from tests.release.release_parts import CHALLENGER, CHAMPION, MODEL, PREVIOUS, TARGET, Scene
from tests.release.release_scenes import serving, with_candidate


@pytest.fixture
def scene() -> Scene:
    """Return a scene in which version 1 serves, and version 2 failed its gates."""
    return with_candidate(serving("a"), verdict=Verdict.FAIL)


def overrides(scene: Scene) -> list[LedgerEntry]:
    return [
        entry
        for entry in scene.world.ledger.read("digits")
        if isinstance(entry.body, OverrideRecorded)
    ]


def test_reconcile_with_signed_override_serves_version_and_records_author(scene: Scene) -> None:
    scene.give_override("2", "the old one is worse")
    scene.set_alias(CHALLENGER, "2")
    scene.reconcile()
    assert scene.traffic()["v2"] == 100
    (entry,) = overrides(scene)
    assert isinstance(entry.body, OverrideRecorded)
    assert (entry.actor, entry.body.reason) == ("alice", "the old one is worse")


def test_override_tag_without_trusted_signature_is_ignored(scene: Scene) -> None:
    scene.world.registry.annotate(MODEL, "2", {override_reason_tag(TARGET): "sure"})
    scene.set_alias(CHALLENGER, "2")
    assert scene.reconcile()[0].refused
    scene.give_override("2", "sure", signer=FakeSigner(b"somebody else"))
    scene.set_alias(CHALLENGER, "2")
    assert scene.reconcile()[0].refused
    assert overrides(scene) == []
    assert scene.traffic() == {"v1": 100}


def test_override_after_rollback_is_applied_only_if_signed_later(scene: Scene) -> None:
    scene.give_override("2", "sure")
    scene.set_alias(CHALLENGER, "2")
    scene.reconcile()
    scene.roll_back()
    scene.reconcile()
    scene.set_alias(CHALLENGER, "2")
    scene.reconcile()
    scene.set_alias(CHAMPION, "2")
    assert any(report.refused for report in scene.reconcile())
    assert scene.traffic()["v1"] == 100
    assert len(overrides(scene)) == 1
    scene.give_override("2", "sure, now that the network is well")
    scene.set_alias(CHALLENGER, "2")
    scene.reconcile()
    assert scene.traffic()["v2"] == 100


class SigningRegistry(FakeRegistry):
    """A registry whose server signs overrides, or refuses them."""

    def __init__(self, *, refusing: bool) -> None:
        super().__init__()
        self.scene = Scene(world=FakeWorld(registry=self))
        self.open_refusal = refusing

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        reason = tags.get(override_reason_tag(TARGET))
        if reason is not None and override_record_tag(TARGET) not in tags:
            if self.open_refusal:
                raise RefusedError("policy.yaml:6 permits only alice to override")
            self.scene.give_override(version, reason)
        super().annotate(model, version, tags)


def behind_a_server(*, refusing: bool) -> Scene:
    world = SigningRegistry(refusing=refusing).scene.world
    return with_candidate(serving("a", world=world), verdict=Verdict.FAIL)


def test_promote_with_override_signed_by_server_records_one_override() -> None:
    scene = behind_a_server(refusing=False)
    scene.promote("2", override=True, reason="sure")
    scene.reconcile()
    scene.roll_back()
    scene.reconcile()
    scene.set_alias(CHAMPION, "2")
    assert any(report.refused for report in scene.reconcile())
    assert len(overrides(scene)) == 1


def test_promote_with_override_refused_by_server_records_no_override() -> None:
    scene = behind_a_server(refusing=True)
    with pytest.raises(RefusedError, match="permits only alice to override"):
        scene.promote("2", override=True, reason="sure")
    assert overrides(scene) == []


class VetoingRegistry(FakeRegistry):
    """A registry whose server refuses aliases on some versions."""

    def __init__(self) -> None:
        super().__init__()
        self.vetoed: set[str] = set()
        self.asked: list[str] = []

    def set_alias(self, model: str, alias: str, version: str) -> None:
        self.asked.append(alias)
        if version in self.vetoed:
            raise RefusedError("the key of its decision was retired")
        super().set_alias(model, alias, version)


def vetoing() -> tuple[Scene, VetoingRegistry]:
    registry = VetoingRegistry()
    return serving("a", "b", world=FakeWorld(registry=registry)), registry


def test_rollback_with_vetoed_alias_moves_traffic_and_keeps_alias_pending() -> None:
    scene, registry = vetoing()
    registry.vetoed = {"1"}
    scene.roll_back()
    with pytest.raises(RefusedError, match="retired"):
        scene.reconcile()
    assert scene.traffic()["v1"] == 100
    assert scene.aliases()[CHAMPION] == "2"
    assert scene.state().pending_aliases[CHAMPION] == "1"
    registry.vetoed = set()
    scene.reconcile()
    assert scene.aliases()[CHAMPION] == "1"
    assert scene.state().pending_aliases == {}


def test_refused_champion_alias_that_cannot_be_restored_is_deleted() -> None:
    scene, registry = vetoing()
    scene.set_alias(CHAMPION, scene.publish("c", verdict=Verdict.FAIL))
    registry.vetoed = {"2"}
    assert scene.reconcile()[0].refused
    assert CHAMPION not in scene.aliases()
    assert scene.traffic()["v2"] == 100


def test_finish_sets_previous_alias_before_champion_alias() -> None:
    scene, registry = vetoing()
    registry.asked.clear()
    scene.serve(scene.publish("c"))
    assert registry.asked == [CHALLENGER, PREVIOUS, CHAMPION]


def restored(scene: Scene, count: int) -> Scene:
    """Return the world after a loss of the machine.

    A backup of the ledger with `count` entries is restored.
    """
    kept = MemoryLedger()
    for entry in scene.world.ledger.read("digits")[:count]:
        kept.append(entry)
    scene.world = replace(scene.world, ledger=kept, provider=FakeProvider())
    return scene


def overridden_and_rolled_back() -> Scene:
    """Return a scene with a ledger from before an override.

    Version 2 failed its gates, served by an override, and was rolled back. The ledger is older than
    all that.
    """
    scene = with_candidate(serving("a"), verdict=Verdict.FAIL)
    before = len(scene.world.ledger.read("digits"))
    scene.world.clock.advance(1)
    scene.promote("2", override=True, reason="sure")
    scene.reconcile()
    scene.world.clock.advance(1)
    scene.roll_back()
    scene.reconcile()
    scene.world.clock.advance(1)
    return restored(scene, before)


@pytest.mark.parametrize("alias", [CHALLENGER, CHAMPION])
def test_rolled_back_version_after_restore_of_older_ledger_is_refused(alias: str) -> None:
    """The old override is still valid.

    The registry records that the rollback came later.
    """
    scene = overridden_and_rolled_back()
    scene.set_alias(alias, "2")
    (refused,) = [report for report in scene.reconcile() if report.refused]
    assert refused.why.startswith("digits/2: endpoint digits rolled this release back")
    assert "v2" not in scene.traffic()
    assert overrides(scene) == []
    with pytest.raises(RefusedError, match="rolled this release back"):
        scene.promote("2")


@pytest.mark.parametrize("hours", [0, -1], ids=["a right clock", "a slow clock"])
def test_later_override_after_restore_of_older_ledger_serves_rolled_back_version(
    hours: int,
) -> None:
    scene = overridden_and_rolled_back()
    scene.world.clock.advance(3600 * hours)
    scene.promote("2", override=True, reason="sure again")
    scene.reconcile()
    assert scene.traffic()["v2"] == 100


def test_rolled_back_tag_of_version_that_serves_again_is_cleared() -> None:
    scene = serving("a", "b")
    scene.roll_back()
    scene.reconcile()
    assert scene.record("2").tags["onnxops.rolled-back.digits"].endswith("it is slow")
    scene.roll_back(to="2", force=True)
    scene.reconcile()
    assert scene.record("2").tags["onnxops.rolled-back.digits"] == ""
    assert scene.record("1").tags["onnxops.rolled-back.digits"].endswith("it is slow")
