"""What `onnx-ops ledger adopt` prints about the endpoint before it asks for confirmation."""

from __future__ import annotations

from onnx_ops.cli.ledgers import _compare_with_endpoint
from tests.release.release_scenes import serving

ENDPOINT = "digits"


def test_compare_with_endpoint_after_later_rollback_names_rollback_command() -> None:
    scene = serving("a", "b")
    older = scene.context.ledger.state(ENDPOINT)
    assert not _compare_with_endpoint(scene.context, older)
    scene.roll_back()
    (line,) = _compare_with_endpoint(scene.context, older)
    assert line.startswith("the endpoint serves v1, not v2")
    assert "`onnx-ops rollback digits --to 1 --reason" in line


def test_compare_with_endpoint_that_serves_later_version_names_effect_of_reconcile() -> None:
    scene = serving("a")
    older = scene.context.ledger.state(ENDPOINT)
    scene.serve(scene.publish("b"))
    (line,) = _compare_with_endpoint(scene.context, older)
    assert "`onnx-ops reconcile digits` first gives all traffic to v1" in line


def test_compare_with_endpoint_that_does_not_answer_returns_no_line() -> None:
    scene = serving("a", "b")
    older = scene.context.ledger.state(ENDPOINT)
    scene.roll_back()
    scene.world.provider.down = True
    assert not _compare_with_endpoint(scene.context, older)
