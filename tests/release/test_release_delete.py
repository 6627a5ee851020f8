"""Deletion of endpoints, over fakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnx_ops.domain.ledger import EndpointDeleted
from onnx_ops.errors import NotFoundError, RefusedError
from onnx_ops.release.journal import list_bound_endpoints
from onnx_ops.release.promote import delete_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import withdraw_request
from tests.release.release_parts import CHAMPION, Scene, config_of
from tests.release.release_scenes import (
    copies_of,
    refused_while_at_work,
    request_while_down,
    serving,
)
from tests.support.faults import Faults, Killed


@pytest.fixture
def scene() -> Scene:
    return serving("a", "b")


def test_delete_endpoint_removes_traffic_and_keeps_history(scene: Scene) -> None:
    before = len(scene.world.ledger.read("digits"))
    delete_endpoint(scene.context, "digits", reason="no longer needed")
    assert scene.traffic() == {}
    assert list_bound_endpoints(scene.context) == ()
    added = scene.world.ledger.read("digits")[before:]
    assert [entry.body for entry in added] == [
        EndpointDeleted(reason="no longer needed"),
        EndpointDeleted(reason="no longer needed", done=True),
    ]
    assert scene.aliases()[CHAMPION] == "2"
    with pytest.raises(NotFoundError):
        delete_endpoint(scene.context, "digits")


def delete(scene: Scene) -> None:
    delete_endpoint(scene.context, "digits")


@pytest.mark.parametrize("finish", [Scene.reconcile_some, delete, Scene.bind])
def test_delete_endpoint_after_kill_is_completed_once(finish: Callable[[Scene], object]) -> None:
    copies = copies_of(lambda: serving("a"))
    whole = copies()
    whole.faults = counted = Faults()
    delete(whole)
    assert counted.moments > 6
    completed = 0
    for at in range(counted.moments):
        scene = copies()
        scene.faults = Faults(at=at)
        with pytest.raises(Killed):
            delete(scene)
        scene.restart()
        if scene.state().config is None or not scene.state().deleting:
            continue
        finish(scene)
        assert scene.traffic() == {}
        assert not scene.state().deleting
        done = [
            e for e in scene.world.ledger.read("digits") if e.body == EndpointDeleted(done=True)
        ]
        assert len(done) == 1
        completed += 1
    assert completed > 2


def test_rebind_of_deleted_endpoint_keeps_rejected_releases(scene: Scene) -> None:
    generation = scene.state().generation
    scene.roll_back()
    scene.reconcile()
    rejected = scene.state().rejected
    assert rejected
    delete_endpoint(scene.context, "digits")
    scene.bind()
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert scene.state().generation > generation
    assert scene.state().rejected == rejected
    with pytest.raises(RefusedError):
        scene.promote("2")


def test_delete_endpoint_during_another_change_is_refused(scene: Scene) -> None:
    refused_while_at_work(scene, lambda context: delete_endpoint(context, "digits"))
    delete_endpoint(scene.context, "digits")
    assert scene.traffic() == {}


def test_withdraw_request_of_pending_deletion_keeps_endpoint(scene: Scene) -> None:
    request_while_down(scene, delete)
    withdraw_request(scene.context, "digits", reason="it is needed")
    scene.reconcile()
    assert scene.world.provider.observe(config_of("digits")) is not None


def test_withdraw_request_of_pending_deletion_keeps_pending_rollback(scene: Scene) -> None:
    served = next(name for name, weight in scene.traffic().items() if weight)
    request_while_down(scene)
    request_while_down(scene, delete)
    withdraw_request(scene.context, "digits", reason="it is needed")
    assert scene.reconcile()[0].did == "rollback"
    assert scene.traffic().get(served, 0) == 0


def test_delete_of_unreachable_endpoint_stays_pending_until_reconciled(scene: Scene) -> None:
    request_while_down(scene, delete)
    with pytest.raises(RefusedError, match="being deleted"):
        scene.roll_back()
    assert reconcile_until_stable(scene.context, "digits")[-1].did == "deleted"
    assert scene.state().config is None
    assert scene.world.provider.observe(config_of("digits")) is None
