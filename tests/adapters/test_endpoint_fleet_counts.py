"""Fleets whose number of instances changes during a rollout, on simulated machines."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.release.promote import bind_endpoint
from tests.chaos.cloud_trial_faults import FaultPlan
from tests.chaos.cloud_trial_places import ENDPOINT, Cloud, Machines, open_place
from tests.chaos.cloud_trials import TrialScene
from tests.release.release_parts import CANARY, config_of
from tests.support.clouds.virtual_time import VirtualTime
from tests.support.extras import require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")


@pytest.mark.parametrize("cloud", ["sagemaker", "azureml"])
def test_fleet_rollback_after_raised_instance_count_completes(cloud: Cloud, tmp_path: Path) -> None:
    """The rollback is complete before the cloud starts further instances."""
    clock = VirtualTime()
    plan = FaultPlan(random=random.Random(1), clock=clock, is_active=False)  # noqa: S311
    with (
        open_place(cloud, "table", tmp_path / "cloud") as place,
        place.begin(clock, plan, tmp_path),
    ):
        scene = TrialScene(place, tmp_path, clock)

        def bind(count: int) -> None:
            machines = Machines(count=count, kind=place.kinds[0], image="")
            settings = place.list_settings(machines)
            config = replace(config_of(ENDPOINT), provider=cloud, settings=settings)
            bind_endpoint(scene.context, config, CANARY)

        bind(2)
        for factor in (2.0, 3.0):
            scene.promote(scene.release_factor(factor))
            scene.reconcile()
        assert scene.state().roles.candidate is not None
        bind(3)
        scene.roll_back()
        assert scene.state().pending_rollback is None
        assert place.list_splits() == [{2.0: 100}] * 2
        scene.reconcile()
        assert place.list_splits() == [{2.0: 100}] * 3
