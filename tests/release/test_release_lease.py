"""Effects that take longer than a lease, such as a new deployment in a cloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onnx_ops.domain.ledger import Intent, LeaseRenewed, LedgerEntry
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.release import effects as lease
from onnx_ops.release.effects import LEASE_S, renew_lease
from onnx_ops.release.journal import Journal
from onnx_ops.release.reconcile import reconcile_until_stable
from tests.release.release_parts import Scene, effects, roll_back
from tests.release.release_scenes import serving, with_candidate
from tests.support.golden import Golden
from tests.support.processes import until

UPDATE_S = 20 * 60


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Return a scene in which version 1 serves and version 2 is promoted."""
    monkeypatch.setattr(lease, "LEASE_CHECK_INTERVAL_S", 0.001)
    scene = with_candidate(serving("a"))
    scene.promote("2")
    return scene


def renewals(scene: Scene) -> list[LedgerEntry]:
    return [
        entry for entry in scene.world.ledger.read("digits") if isinstance(entry.body, LeaseRenewed)
    ]


def during_an_update(scene: Scene, every_half_lease: Callable[[int], object]) -> None:
    """Let the next change of the endpoint take as long as in a cloud.

    The clock advances by half a lease for each step.
    """
    provider = scene.world.provider
    apply = provider.apply

    def slowly(*arguments: Any, **options: Any) -> None:
        provider.apply = apply  # type: ignore[method-assign]
        for turn in range(int(UPDATE_S / (LEASE_S / 2))):
            scene.world.clock.advance(LEASE_S / 2)
            every_half_lease(turn)
        apply(*arguments, **options)

    provider.apply = slowly  # type: ignore[method-assign]


def test_lease_during_long_update_is_renewed(scene: Scene, golden: Golden) -> None:
    reports: list[str] = []

    def look(turn: int) -> None:
        until(lambda: len(renewals(scene)) > turn)
        (report,) = reconcile_until_stable(scene.world.context("another driver"), "digits")
        reports.append(report.why)

    during_an_update(scene, look)
    scene.reconcile()
    golden("reasons", "\n".join(set(reports)))
    assert effects(scene.world.ledger.read("digits")) == ["first-deployment", "finish"]
    assert scene.traffic() == {"v2": 100, "v1": 0}
    found = renewals(scene)
    assert len(found) == UPDATE_S / (LEASE_S / 2)
    intents = [e.sequence for e in scene.world.ledger.read("digits") if isinstance(e.body, Intent)]
    assert {entry.body.of for entry in found} == {intents[-1]}  # type: ignore[union-attr]


def test_lease_of_stopped_holder_expires(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A stopped process does not renew its lease.

    Another process overtakes it, and its later actions are refused.
    """
    monkeypatch.setattr(lease, "LEASE_CHECK_INTERVAL_S", 3600.0)

    def look(turn: int) -> None:
        if turn == 2:
            golden(
                "reasons",
                reconcile_until_stable(scene.world.context("another driver"), "digits")[0].why,
            )

    during_an_update(scene, look)
    scene.reconcile()
    assert effects(scene.world.ledger.read("digits")) == ["first-deployment", "finish"]
    assert scene.traffic() == {"v2": 100, "v1": 0}


def test_lease_of_overtaken_holder_is_not_renewed(scene: Scene) -> None:
    """An operator needs no lease.

    The operator's change stays in effect, however long the other process runs.
    """

    def look(turn: int) -> None:
        if turn == 0:
            until(lambda: len(renewals(scene)) == 1)
            roll_back(scene.world.context("operator"), "digits", to="1")

    during_an_update(scene, look)
    scene.reconcile()
    assert len(renewals(scene)) == 1
    assert scene.traffic()["v1"] == 100


def test_lease_renewal_with_transient_ledger_errors_completes_update(scene: Scene) -> None:
    ledger = scene.world.ledger
    append = ledger.append
    failed: list[LedgerEntry] = []

    def unreachable(entry: LedgerEntry) -> None:
        if isinstance(entry.body, LeaseRenewed) and len(failed) < 3:
            failed.append(entry)
            raise ServiceUnavailableError("the ledger does not answer")
        append(entry)

    ledger.append = unreachable  # type: ignore[method-assign]
    during_an_update(scene, lambda turn: turn or until(lambda: renewals(scene)))
    scene.reconcile()
    assert len(failed) == 3
    assert scene.traffic() == {"v2": 100, "v1": 0}


def test_lease_renewal_without_open_intent_is_ignored() -> None:
    scene = serving("a")
    journal = Journal.open(scene.context, "digits")
    assert not renew_lease(journal, journal.state.generation)
    journal.append(LeaseRenewed(of=journal.state.generation, expires_at=1e12))
    assert journal.state.open_intent is None
