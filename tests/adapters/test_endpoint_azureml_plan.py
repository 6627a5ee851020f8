"""Conversion between an endpoint state and Azure's terms: names, tags, traffic.

The conversion is pure, so these tests run without the SDK.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from onnx_ops.adapters.endpoints.azureml_plan import (
    build_azure_name,
    build_record_tags,
    plan_traffic,
    read_record,
    read_state,
)
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.execution import Execution, SessionSettings

NAMES = st.text("abcXYZ019-_ .é", min_size=1, max_size=60)


def deployment(name: str, content: bytes = b"", **other: str | int) -> Deployment:
    given = {"model": "m", "version": "1", "variant": "fp32", "location": "/somewhere", **other}
    manifest = digest_bytes(content)
    return Deployment(name=name, release=digest_bytes(b"r"), manifest=manifest, **given)  # type: ignore[arg-type]


@st.composite
def states(draw: st.DrawFn) -> EndpointState:
    names = draw(st.lists(NAMES, min_size=1, max_size=9, unique=True))
    cuts = sorted(
        draw(st.lists(st.integers(0, 100), min_size=len(names) - 1, max_size=len(names) - 1))
    )
    weights = dict(
        zip(names, (b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)), strict=True)
    )
    return EndpointState(
        deployments=tuple(deployment(name, name.encode()) for name in names),
        split=TrafficSplit(weights=weights),
    )


@given(states(), st.integers(0, 10**6))
def test_read_state_of_planned_traffic_returns_equivalent_state(
    state: EndpointState, generation: int
) -> None:
    plan = plan_traffic(state, generation=generation)
    records = {
        name: read_record(build_record_tags(found)) for name, found in plan.deployments.items()
    }
    back = read_state(plan.tags, plan.traffic, {k: v for k, v in records.items() if v is not None})
    assert back is not None
    assert back.is_equivalent(state)
    assert back.generation == generation


@given(states())
def test_plan_traffic_of_any_state_has_full_traffic_and_tags_within_limits(
    state: EndpointState,
) -> None:
    plan = plan_traffic(state, generation=1)
    assert sum(plan.traffic.values()) == 100
    tags = [plan.tags, *(build_record_tags(found) for found in plan.deployments.values())]
    assert all(
        len(key) <= 512 and len(value) <= 256 for some in tags for key, value in some.items()
    )
    assert all(len(some) <= 40 for some in tags)


@given(NAMES, NAMES)
def test_build_azure_name_of_any_deployment_is_valid_and_unique(one: str, other: str) -> None:
    for name in (one, other):
        assert re.fullmatch(
            r"(?=.{3,32}\Z)[a-z]([-a-z0-9]*[a-z0-9])?", build_azure_name(deployment(name))
        )
    assert build_azure_name(deployment(one)) == build_azure_name(
        deployment(one, location="/elsewhere")
    )
    assert build_azure_name(deployment(one)) != build_azure_name(deployment(one, b"other"))
    others = deployment(one, batchable=True), deployment(one, threads=1)
    assert len({build_azure_name(each) for each in (deployment(one), *others)}) == 3
    threads = Execution(session=SessionSettings(intra_op_threads=2))
    assert build_azure_name(deployment(one)) != build_azure_name(
        replace(deployment(one), execution=threads)
    )
    assume(one != other)
    assert build_azure_name(deployment(one)) != build_azure_name(deployment(other))


@given(states())
def test_read_state_with_missing_record_or_tags_or_wrong_traffic_returns_none(
    state: EndpointState,
) -> None:
    plan = plan_traffic(state, generation=1)
    records = dict(plan.deployments)
    lost = next(iter(records))
    assert (
        read_state(plan.tags, plan.traffic, {k: v for k, v in records.items() if k != lost}) is None
    )
    assert read_state(plan.tags, {}, records) is None
    assert read_state(plan.tags, {**plan.traffic, "stranger": 1}, records) is None
    assert read_state({}, plan.traffic, records) is None
