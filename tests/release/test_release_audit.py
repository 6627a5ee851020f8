"""Versions that depend on a signing key."""

from __future__ import annotations

from onnx_ops.release.audit import Dependent, list_deployed_dependents
from onnx_ops.testing.fakes import FakeSigner
from tests.release.release_scenes import on_trial


def test_list_deployed_dependents_returns_stable_previous_and_candidate_of_key() -> None:
    scene = on_trial()
    dependents = list_deployed_dependents(scene.context, FakeSigner().key)
    assert set(dependents) == {
        Dependent(model="digits", version=version, endpoint="digits") for version in "123"
    }
    assert list_deployed_dependents(scene.context, FakeSigner(b"another key").key) == ()
