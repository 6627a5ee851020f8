"""Dry runs: they change nothing, and list what the operation then changes."""

from __future__ import annotations

import inspect
import random

import pytest

from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import Context, EndpointProvider, MetricsSource
from onnx_ops.release.changes import ChangeKind
from onnx_ops.release.dry_run import DryRun
from onnx_ops.release.endpoint_overlay import EndpointOverlay, MetricsOverlay
from onnx_ops.testing.fakes import FakeModelFiles
from tests.release.dry_run_truth import (
    CONFIGS,
    attempt,
    choose_operation,
    compare,
    failing,
    grow,
    promote_version,
    roll_back,
)
from tests.release.release_parts import CANARY, Scene
from tests.release.release_scenes import serving


@pytest.mark.parametrize("seed", range(100))
def test_dry_run_in_random_state_equals_operation(seed: int) -> None:
    random_, scene = random.Random(seed), Scene()  # noqa: S311 (a seed repeats a state)
    grow(scene, random_)
    name, operation = choose_operation(random_)
    compared = compare(scene.context, CONFIGS, operation, FakeModelFiles())
    assert not compared.differences, (name, compared)


@pytest.mark.parametrize("seed", range(100, 140))
def test_dry_run_after_partial_failure_lists_what_remains(seed: int) -> None:
    random_, scene = random.Random(seed), Scene()  # noqa: S311 (a seed repeats a state)
    grow(scene, random_)
    name, operation = choose_operation(random_)
    dry_run = DryRun(scene.context, FakeModelFiles())
    attempt(operation, dry_run.context)
    intended = [c.after for c in dry_run.changes if c.kind is ChangeKind.LEDGER_ENTRY]
    before = sum(scene.world.ledger.count(one) for one in scene.world.ledger.endpoints())
    error = ServiceUnavailableError("the connection was lost")
    with failing(scene.world.provider, random_, error=error) as failure:
        attempt(operation, scene.context)
    after = sum(scene.world.ledger.count(one) for one in scene.world.ledger.endpoints())
    if not failure:
        assert after - before == len(intended), name
    compared = compare(scene.context, CONFIGS, operation, FakeModelFiles())
    assert not compared.differences, (name, compared)


def test_dry_run_while_endpoint_does_not_answer_ends_with_error_of_rollback() -> None:
    scene = serving("a", "b")
    scene.world.provider.down = True

    def operate(context: Context) -> object:
        return roll_back(context, ("digits",))

    compared = compare(scene.context, CONFIGS, operate, FakeModelFiles())
    assert not compared.differences
    assert "still pending" in str(compared.result)
    assert [change.kind for change in compared.changes] == [ChangeKind.LEDGER_ENTRY] * 3


@pytest.mark.parametrize(
    ("port", "overlay"), [(EndpointProvider, EndpointOverlay), (MetricsSource, MetricsOverlay)]
)
def test_overlay_defines_every_method_of_its_port(port: type, overlay: type) -> None:
    methods = {name for name, _ in inspect.getmembers(port, inspect.isfunction)}
    assert {name for name in methods if not name.startswith("_")} <= set(vars(overlay))


def test_dry_run_of_promotion_lists_its_changes_rights_and_next_rollback() -> None:
    scene = serving("a")
    scene.bind(policy=CANARY)
    version = scene.publish("b")
    dry_run = DryRun(scene.context, FakeModelFiles())
    promote_version(dry_run.context, version, override=False)
    kinds = [change.kind for change in dry_run.changes]
    assert kinds == [
        ChangeKind.ALIAS,
        ChangeKind.MODEL_FOLDER,
        ChangeKind.LEDGER_ENTRY,
        ChangeKind.DEPLOYMENT,
        ChangeKind.TRAFFIC,
        ChangeKind.LEDGER_ENTRY,
        ChangeKind.LEDGER_ENTRY,
        ChangeKind.CONFIRMATION,
    ]
    texts = [change.describe() for change in dry_run.changes]
    assert texts[0] == "would set alias challenger-cpu of digits: none -> 2"
    assert texts[3:5] == [
        "would load v2 on digits",
        "would move the traffic of digits: v1 100 % -> v1 90 %, v2 10 %",
    ]
    assert dry_run.list_needs() == (
        "the right to change digits in the registry",
        "the right to write the ledger in in memory",
        "a release key that the ledger of digits accepts",
        "the right to change digits in memory",
        "the lease of digits, for at most 120 s at a time",
    )
    assert [one.to for one in dry_run.list_rollbacks()] == ["v1"]
