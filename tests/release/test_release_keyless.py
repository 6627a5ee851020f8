"""A process without a trusted key.

The tests also cover forged outcomes of actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from onnx_ops.adapters.ledgers.chain import LedgerKeys
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.ledger import ActionOutcome, Intent, RollbackRequested
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import MissingKeyError, StillPendingError
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint, delete_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import send_command, withdraw_request
from onnx_ops.testing.fakes import FakeSigner, FakeWorld, make_ledger_keys
from tests.release.release_parts import AT_ONCE, Scene, config_of, roll_back
from tests.release.release_scenes import on_trial_in, serving
from tests.support.chains import MemoryObjects, append_raw

ENDPOINT = "digits"
KEYS = make_ledger_keys()
KEYLESS = LedgerKeys(KEYS.verifier, lambda: None)


class Site:
    """A scene with a key, whose ledger a process without a key can open too."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.scene = Scene(world=FakeWorld(ledger=ObjectLedger(self.objects, KEYS)))

    @property
    def keyless(self) -> Context:
        world = replace(self.scene.world, ledger=ObjectLedger(self.objects, KEYLESS))
        return replace(world.context("keyless"), signer=lambda: None)


@pytest.fixture
def site() -> Site:
    """Return a site in which version 2 has replaced version 1."""
    site = Site()
    serving("a", "b", world=site.scene.world)
    return site


@pytest.fixture
def trial() -> Site:
    """Return a site in which version 2 has replaced 1, and version 3 is on trial."""
    site = Site()
    on_trial_in(serving("a", "b", world=site.scene.world))
    return site


def test_roll_back_without_key_moves_traffic(site: Site) -> None:
    assert roll_back(site.keyless, ENDPOINT, reason="3 am").moved_to == "v1"
    assert site.scene.traffic()["v1"] == 100
    reconcile_until_stable(site.keyless, ENDPOINT)
    assert site.scene.aliases()["champion-cpu"] == "1"


def test_abort_and_pause_without_key_stop_rollout(trial: Site) -> None:
    send_command(trial.keyless, ENDPOINT, OperatorCommand.PAUSE)
    assert trial.scene.state().command is OperatorCommand.PAUSE
    assert roll_back(trial.keyless, ENDPOINT, candidate_only=True).moved_from == "v3"
    assert trial.scene.traffic()["v2"] == 100


@pytest.mark.parametrize(
    ("grant", "what"),
    [
        (lambda c: send_command(c, ENDPOINT, OperatorCommand.ADVANCE), "orders to advance"),
        (lambda c: bind_endpoint(c, config_of(ENDPOINT), AT_ONCE), "binds"),
        (lambda c: delete_endpoint(c, ENDPOINT, reason="old"), "deletes"),
        (lambda c: roll_back(c, ENDPOINT, to="3"), "does more than return traffic"),
    ],
)
def test_signed_operation_without_key_raises_missing_key_error_and_keeps_ledger(
    trial: Site, grant: Callable[[Context], object], what: str
) -> None:
    before = dict(trial.objects.data)
    with pytest.raises(MissingKeyError, match=what) as caught:
        grant(trial.keyless)
    assert "trusted release key" in caught.value.remedy
    assert trial.objects.data == before


def test_withdraw_request_without_key_is_refused(site: Site) -> None:
    site.scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        roll_back(site.keyless, ENDPOINT)
    with pytest.raises(MissingKeyError, match="withdraws a request"):
        withdraw_request(site.keyless, ENDPOINT, reason="no")


def test_reconcile_without_key_refuses_new_rollout_and_restores_endpoint(site: Site) -> None:
    site.scene.promote(site.scene.publish("c"))
    with pytest.raises(MissingKeyError, match="begins finish"):
        reconcile_until_stable(site.keyless, ENDPOINT)
    site.scene.world.provider._states.clear()
    with pytest.raises(MissingKeyError):
        reconcile_until_stable(site.keyless, ENDPOINT)
    assert site.scene.traffic()["v2"] == 100


def test_reconcile_without_key_finishes_signed_intent(site: Site) -> None:
    site.scene.promote(site.scene.publish("c"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(site.scene.world.provider, "apply", killed)
        with pytest.raises(KeyboardInterrupt):
            site.scene.reconcile()
    site.scene.restart()
    reconcile_until_stable(site.keyless, ENDPOINT)
    assert site.scene.traffic()["v3"] == 100


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_begun", [True, False])
def test_reconcile_with_forged_outcome_completes_pending_rollback(
    site: Site, is_begun: bool
) -> None:
    site.scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        roll_back(site.scene.context, ENDPOINT)
    pending = site.scene.state().pending_rollback
    assert pending is not None
    if is_begun:
        append_raw(
            site.objects, ENDPOINT, Intent(action=pending.action, holder="alice", expires_at=0.0)
        )
    entries = ObjectLedger(site.objects, KEYS).read(ENDPOINT)
    last = max(e.sequence for e in entries if isinstance(e.body, Intent | RollbackRequested))
    append_raw(site.objects, ENDPOINT, ActionOutcome(of=last, ok=True))
    site.scene.world.provider.down = False
    world = replace(site.scene.world, ledger=ObjectLedger(site.objects, KEYS))
    reconcile_until_stable(world.context("next"), ENDPOINT)
    assert site.scene.traffic()["v1"] == 100
    assert site.scene.record("2").tags["onnxops.rolled-back.digits"]


def test_roll_back_with_remote_signer_requests_no_signature(site: Site) -> None:
    asked: list[bytes] = []
    service = FakeSigner()
    service.is_local = False
    service.sign = asked.append  # type: ignore[assignment, method-assign]
    world = replace(
        site.scene.world,
        ledger=ObjectLedger(site.objects, LedgerKeys(KEYS.verifier, lambda: service)),
    )
    roll_back(world.context("with a service"), ENDPOINT)
    assert (site.scene.traffic()["v1"], asked) == (100, [])
