"""Fleets whose number of instances changes, on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from onnx_ops.errors import InfrastructureError
from onnx_ops.protocol.replica_reports import SILENT_S
from onnx_ops.release.promote import bind_endpoint
from tests.chaos.cloud_trial_faults import FaultPlan
from tests.chaos.cloud_trial_places import ENDPOINT, Cloud, Machines, Place, open_place
from tests.chaos.cloud_trials import TrialScene
from tests.release.release_parts import CANARY, config_of
from tests.support.clouds.containers import NotReadyError
from tests.support.clouds.virtual_time import VirtualTime
from tests.support.extras import require
from tests.support.must import must

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")


class FleetScene(TrialScene):
    """The release layer over a fleet."""

    def bind_count(self, count: int) -> None:
        """Change the number of instances in the options."""
        machines = Machines(count=count, kind=self.place.kinds[0], image="")
        options = self.place.list_options(machines)
        provider = "sagemaker" if "role" in options else "azureml"
        config = replace(config_of(ENDPOINT), provider=provider, options=options)
        bind_endpoint(self.context, config, CANARY)


@contextmanager
def open_scene(cloud: Cloud, folder: Path) -> Iterator[tuple[FleetScene, Place]]:
    clock = VirtualTime()
    plan = FaultPlan(random=random.Random(1), clock=clock, is_active=False)  # noqa: S311
    with open_place(cloud, "table", folder / "cloud") as place, place.begin(clock, plan, folder):
        yield FleetScene(place, folder, clock), place


@pytest.mark.parametrize("cloud", ["sagemaker", "azureml"])
def test_fleet_rollback_after_raised_instance_count_completes(cloud: Cloud, tmp_path: Path) -> None:
    """The rollback is complete before the cloud starts further instances."""
    with open_scene(cloud, tmp_path) as (scene, place):
        scene.bind_count(2)
        for factor in (2.0, 3.0):
            scene.promote(scene.release_factor(factor))
            scene.reconcile()
        assert scene.state().roles.candidate is not None
        scene.bind_count(3)
        scene.roll_back()
        assert scene.state().pending_rollback is None
        assert place.list_splits() == [{2.0: 100}] * 2
        scene.reconcile()
        assert place.list_splits() == [{2.0: 100}] * 3


@pytest.mark.parametrize("cloud", ["sagemaker", "azureml"])
def test_fleet_rollback_after_removal_creates_fleet(cloud: Cloud, tmp_path: Path) -> None:
    """Otherwise, the rollback would stay pending, since no observation could show it."""
    with open_scene(cloud, tmp_path) as (scene, place):
        scene.bind_count(2)
        for factor in (2.0, 3.0):
            scene.promote(scene.release_factor(factor))
            scene.reconcile()
        config = must(scene.state().config)
        scene.provider.native.remove(config)
        place.clock.sleep(2 * SILENT_S)
        scene.roll_back()
        assert scene.state().pending_rollback is None
        assert place.list_splits() == [{2.0: 100}] * 2


@pytest.mark.parametrize("cloud", ["sagemaker", "azureml"])
def test_fleet_with_failed_start_of_further_instance_serves_and_reconciles_later(
    cloud: Cloud, tmp_path: Path
) -> None:
    """The running instances serve meanwhile, although Azure shows their deployment as failed."""
    with open_scene(cloud, tmp_path) as (scene, place):
        scene.bind_count(1)
        scene.promote(scene.release_factor(2.0))
        scene.reconcile()
        scene.bind_count(2)
        error = NotReadyError("no capacity")
        with (
            patch.object(place.containers, "_grow", side_effect=error),
            pytest.raises(InfrastructureError),
        ):
            scene.reconcile()
        assert place.list_splits() == [{2.0: 100}]
        for _ in range(2):
            scene.reconcile()
        assert place.list_splits() == [{2.0: 100}] * 2
