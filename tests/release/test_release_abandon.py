"""Endpoints that a changed pipeline file would abandon, over fakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import EndpointAbandoned
from onnx_ops.errors import RefusedError, UserError
from onnx_ops.release.journal import list_bound_endpoints
from onnx_ops.release.promote import (
    abandon_dropped,
    bind_endpoint,
    find_refused_change,
    require_no_orphans,
)
from onnx_ops.release.status import HistoryFilter, read_history
from tests.release.release_parts import AT_ONCE, Scene, config_of
from tests.release.release_scenes import refused_while_at_work
from tests.support.golden import Golden
from tests.support.must import must


def here(**options: str | int) -> EndpointConfig:
    return replace(config_of("digits"), options={"region": "a", **options})


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    bind_endpoint(scene.context, here(), AT_ONCE)
    for seed in ("a", "b"):
        scene.serve(scene.publish(seed))
    return scene


@pytest.mark.parametrize("moved", [{"options": {"region": "b"}}, {"provider": "other"}])
def test_bind_endpoint_with_changed_place_requires_abandon_reason_and_keeps_rejections(
    scene: Scene, moved: dict[str, object], golden: Golden
) -> None:
    config, before = replace(here(), **moved), scene.world.ledger.read("digits")  # type: ignore[arg-type]
    with pytest.raises(RefusedError) as caught:
        bind_endpoint(scene.context, config, AT_ONCE)
    golden("errors", str(caught.value))
    assert scene.world.ledger.read("digits") == before
    scene.roll_back()
    scene.reconcile()
    rejected = scene.state().rejected
    assert rejected
    assert bind_endpoint(scene.context, config, AT_ONCE, abandon="the contract ended")
    entry, _ = scene.world.ledger.read("digits")[-2:]
    assert entry.body == EndpointAbandoned(reason="the contract ended", place="digits in a")
    assert scene.state().config == config
    assert [report.did for report in scene.reconcile()] == ["first-deployment", "wrote aliases", ""]
    assert scene.traffic() == {"v1": 100}
    assert scene.state().rejected == rejected
    lines, _ = read_history(scene.context, HistoryFilter(endpoints=("digits",)))
    assert "abandoned: digits in a" in [line.what for line in lines]


def test_require_no_orphans_with_dropped_endpoint_requires_abandon_reason(scene: Scene) -> None:
    configs = [replace(here(), endpoint="numbers")]
    pipeline = here().pipeline
    with pytest.raises(RefusedError, match="digits would run unmanaged"):
        require_no_orphans(scene.context, pipeline, configs)
    require_no_orphans(scene.context, "another", configs)
    require_no_orphans(scene.context, pipeline, [*configs, here()])
    require_no_orphans(scene.context, pipeline, configs, abandon="renamed")
    assert abandon_dropped(scene.context, pipeline, configs, reason="renamed") == ("digits",)
    assert list_bound_endpoints(scene.context) == ()
    assert scene.traffic() == {"v2": 100, "v1": 0}
    require_no_orphans(scene.context, pipeline, configs)


def test_require_no_orphans_with_endpoint_that_serves_nothing_passes(scene: Scene) -> None:
    bind_endpoint(scene.context, replace(here(), endpoint="empty"), AT_ONCE)
    assert bind_endpoint(scene.context, replace(here(region="b"), endpoint="empty"), AT_ONCE)
    require_no_orphans(scene.context, here().pipeline, [here()])


def test_bind_endpoint_rejects_change_of_immutable_option_and_accepts_mutable_one(
    scene: Scene,
) -> None:
    with pytest.raises(UserError, match="auth"):
        bind_endpoint(scene.context, here(auth="token"), AT_ONCE, abandon="never mind")
    with pytest.raises(UserError, match="auth"):
        require_no_orphans(scene.context, here().pipeline, [here(auth="token")])
    refused = must(find_refused_change(scene.context, here(auth="token")))
    assert "auth" in str(refused)
    assert find_refused_change(scene.context, here(instance_count=2)) is None
    assert bind_endpoint(scene.context, here(instance_count=2), AT_ONCE)


def test_bind_endpoint_with_abandon_reason_during_another_change_is_refused(scene: Scene) -> None:
    refused_while_at_work(
        scene, lambda context: bind_endpoint(context, here(region="b"), AT_ONCE, abandon="it moves")
    )
    assert bind_endpoint(scene.context, here(region="b"), AT_ONCE, abandon="it moves")
