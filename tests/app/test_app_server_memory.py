"""The estimate of `check` for a second version in an endpoint's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from onnx_ops import codec
from onnx_ops.app.server_memory import find_memory_shortages
from onnx_ops.domain.endpoint import EndpointConfig, ServerMemory
from onnx_ops.domain.evidence import ColdStartMeasurement, Evidence
from onnx_ops.errors import ServiceUnavailableError
from tests.release.release_parts import Scene
from tests.release.release_scenes import serving
from tests.statistics.test_statistics_judge import INT8

MIB = 1 << 20
SMALL = ServerMemory(server="r2", workers=4, worker_bytes=100 * MIB, available_bytes=440 * MIB)
LARGE = replace(SMALL, server="r1", available_bytes=460 * MIB)


def find(scene: Scene, *servers: ServerMemory, evidence: Evidence | None = None) -> list[str]:
    def list_memory(config: EndpointConfig) -> Sequence[ServerMemory]:
        return servers

    scene.world.provider.list_memory = list_memory  # type: ignore[method-assign]
    context = scene.context
    if evidence is not None:
        replaced = codec.dumps(evidence)
        context.store.read = lambda digest: replaced  # type: ignore[method-assign]
    return list(find_memory_shortages(context, get_config(scene)))


def get_config(scene: Scene) -> EndpointConfig:
    config = scene.context.ledger.state("digits").config
    assert config is not None
    return config


def test_find_memory_shortages_names_replica_without_enough_memory() -> None:
    (shortage,) = find(serving("a"), LARGE, SMALL)
    assert "replica r2 of endpoint digits" in shortage
    assert "needs 450 MiB (4 workers × 100 MiB" in shortage
    assert "440 MiB are available" in shortage


@pytest.mark.parametrize(("available_mib", "count"), [(449, 1), (450, 0)])
def test_find_memory_shortages_at_limit_includes_reserve(available_mib: int, count: int) -> None:
    assert len(find(serving("a"), replace(SMALL, available_bytes=available_mib * MIB))) == count


def test_find_memory_shortages_with_larger_measured_peaks_uses_their_median() -> None:
    peaks = (150 * MIB, 200 * MIB, 180 * MIB)
    starts = ColdStartMeasurement(
        batch=1, requests=2, load_s=(0.5,) * 3, first_s=(0.5,) * 3, peak_bytes=peaks
    )
    (shortage,) = find(serving("a"), LARGE, evidence=replace(INT8, starts=starts))
    assert "4 workers × 180 MiB" in shortage


def test_find_memory_shortages_without_stable_version_or_reports_returns_nothing() -> None:
    empty, silent = serving(), serving("a")
    assert not find(empty, SMALL)
    assert not find(silent)

    def fail(config: EndpointConfig) -> Sequence[ServerMemory]:
        raise ServiceUnavailableError("the reports cannot be read")

    silent.world.provider.list_memory = fail  # type: ignore[method-assign]
    assert not list(find_memory_shortages(silent.context, get_config(silent)))
