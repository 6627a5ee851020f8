"""Random trials of releases on the fakes of both clouds, with new seeds in each run.

`python -m benchmarks.cloud_faults` runs hundreds of them, and repeats a trial by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from onnx_ops.adapters.endpoints.fleets import TrafficModes
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from tests.chaos.cloud_trial_places import Cloud, Place, Traffic, open_place
from tests.chaos.cloud_trials import run_trial
from tests.support.extras import require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")

TRIALS = 2


def draw_seed() -> int:
    return random.SystemRandom().randrange(10**12)


@pytest.fixture(params=[(c, t) for c in ("sagemaker", "azureml") for t in ("native", "table")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    cloud: Cloud
    traffic: Traffic
    cloud, traffic = request.param
    with open_place(cloud, traffic, tmp_path) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_random_trials_of_clouds_end_in_expected_state_without_lost_request(place: Place) -> None:
    for _ in range(TRIALS):
        result = run_trial(place, draw_seed())
        assert result.is_right, result
        assert result.answered > 0


def test_run_trial_with_endpoint_that_keeps_old_version_reports_wrong_state(tmp_path: Path) -> None:
    """The provider reports success of each update, and always serves the first version."""
    apply, states = TrafficModes.apply, list[EndpointState]()

    def forget(
        provider: TrafficModes, config: EndpointConfig, state: EndpointState, *, generation: int
    ) -> None:
        states.append(state)
        first = replace(states[0], generation=generation)
        apply(provider, config, first, generation=generation)

    def show(_: TrafficModes, config: EndpointConfig) -> EndpointState | None:
        return states[-1] if states else None

    with (
        open_place("sagemaker", "native", tmp_path) as place,
        patch.object(TrafficModes, "apply", forget),
        patch.object(TrafficModes, "observe", show),
    ):
        results = [run_trial(place, seed) for seed in range(3)]
    assert any(result.wrong for result in results)


def test_run_trial_with_failed_request_reports_lost_request(tmp_path: Path) -> None:
    with open_place("sagemaker", "native", tmp_path) as place:
        invoke, count = place.invoke, 0

        def lose(user: str) -> tuple[int, bytes]:
            nonlocal count
            count += 1
            return (502, b"") if count == 150 else invoke(user)

        with patch.object(place, "invoke", lose):
            result = run_trial(place, 1)
    assert len(result.lost) == 1
    assert not result.is_right
