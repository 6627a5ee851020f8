"""A story of releases on Azure ML: the same operations as everywhere, the real SDK, real inference behind it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.prune import delete_orphans, find_orphans
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.adapters.azureml_parts import POLICY, inside, key_of
from tests.release.release_parts import CANARY, MODEL, TARGET, TARGET_DIGEST, Scene
from tests.release.release_scenes import publish_scaling
from tests.support.clouds.azureml import AzureCloud
from tests.support.extras import require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all")


class Azure(Scene):
    """A scene whose endpoint is one in Azure, and whose models compute."""

    def begin(self, cloud: AzureCloud, folder: Path) -> None:
        self.cloud, self.folder = cloud, folder
        self.azure = AzureEndpoints(folder / "endpoints", policy=POLICY)
        self.config = EndpointConfig(
            endpoint="digits",
            provider="azureml",
            model=MODEL,
            target=TARGET,
            target_digest=TARGET_DIGEST,
            pipeline="p",
            settings=cloud.settings,
        )
        bind_endpoint(self.context, self.config, CANARY)

    @property
    def context(self) -> Context:
        kept = ModelFolders(self.folder / "kept")
        source = self.azure.metrics()
        return replace(super().context, provider=lambda _: self.azure, metrics=lambda _: source, files=kept)

    def release(self, factor: float) -> str:
        """A version that multiplies."""
        return publish_scaling(self, self.folder / f"made-{factor}", factor)

    def answers(self, requests: int = 100) -> dict[float, int]:
        """How many of so many requests were multiplied by what."""
        found: dict[float, int] = {}
        address, key = self.azure.address(self.config), key_of(self.config)
        assert address is not None
        headers = {"Content-Type": "application/json", "Authorization": key}
        for _ in range(requests):
            request = urllib.request.Request(f"{address}/invocations", b'{"inputs": {"x": [[1.0, 1.0]]}}', headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                factor = float(json.load(answer)["predictions"]["y"][0][0])
            found[factor] = found.get(factor, 0) + 1
        return found


pytestmark = pytest.mark.services


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Azure]:
    with AzureCloud(tmp_path / "cloud") as cloud, inside(cloud):
        scene = Azure()
        scene.begin(cloud, tmp_path)
        yield scene


def test_from_an_empty_workspace_to_a_canary_and_back(scene: Azure) -> None:
    first, second = scene.release(2.0), scene.release(3.0)
    scene.promote(first)
    scene.reconcile()
    assert scene.answers(10) == {2.0: 10}
    scene.promote(second)
    scene.reconcile()
    assert scene.answers() == {2.0: 90, 3.0: 10}
    scene.say(OperatorCommand.ADVANCE)
    scene.reconcile()
    assert scene.answers() == {2.0: 50, 3.0: 50}
    scene.say(OperatorCommand.ADVANCE)
    scene.reconcile()
    assert scene.answers(10) == {3.0: 10}
    assert scene.aliases()[f"champion-{TARGET}"] == second
    third = scene.release(5.0)
    scene.promote(third)
    scene.reconcile()
    assert scene.answers()[5.0] == 10
    scene.roll_back()
    assert scene.answers(10) == {3.0: 10}
    scene.roll_back(to=first)
    assert scene.answers(10) == {2.0: 10}
    routes = scene.cloud.routes("digits")
    assert all(sum(split.values()) == 100 for split in routes[1:])


@pytest.mark.nightly
def test_orphans_of_a_driver_that_died_are_found_and_removed(scene: Azure) -> None:
    first, second = scene.release(2.0), scene.release(3.0)
    scene.promote(first)
    scene.reconcile()
    stray = scaling_deployment(scene.folder / "stray", name="stray", version="9", scale=9.0)
    served = scene.azure.observe(scene.config)
    assert served is not None
    generation = served.generation
    other = AzureEndpoints(scene.folder / "another-machine", policy=POLICY)
    other.apply(scene.config, state_of(*served.deployments, stray, v1=100, stray=0), generation=generation + 1)
    scene.promote(second)
    scene.reconcile()
    found = find_orphans(scene.context, ["digits"])
    assert found.silent == ()
    assert [one.leftover.kind for one in found.orphans] == ["model"]
    delete_orphans(scene.context, found.orphans)
    assert find_orphans(scene.context, ["digits"]).orphans == ()
    assert scene.answers() == {2.0: 90, 3.0: 10}
