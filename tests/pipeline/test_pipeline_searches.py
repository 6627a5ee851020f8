"""How a search is planned: one stage that tries, and a variant for each role."""

from __future__ import annotations

from dataclasses import replace

from onnx_ops.domain.decision import Objective
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.pipeline import Calibrate, Pipeline, Plan, Quantize, StageKind
from onnx_ops.domain.quantization import Budget, Tune
from onnx_ops.pipeline import InlineExecutor, SilentObserver, plan, run
from onnx_ops.testing.fakes import FakeClock
from tests.pipeline.plan_parts import PIPELINE, TARGETS, CountingHandler, TableProbe, ids

ENTRY = Quantize(name="best", method="auto", tune=Tune(data="extra"), calibrate=Calibrate(data="train"))
SEARCHED = replace(PIPELINE, quantize=(ENTRY,), gates=(*PIPELINE.gates, MetricGate(name="rmse", max_increase=0.1)))


def planned(pipeline: Pipeline = SEARCHED, probe: TableProbe | None = None) -> Plan:
    return plan(pipeline, TARGETS, probe or TableProbe())


def keys(some: Plan) -> dict[str, str]:
    result = run(
        some, handler=CountingHandler(), executor=InlineExecutor(), observer=SilentObserver(), clock=FakeClock()
    )
    return {name: outcome.key for name, outcome in result.outcomes.items() if outcome.key is not None}


def changed(before: Plan, after: Plan) -> set[str]:
    old, new = keys(before), keys(after)
    return {name for name in old if name in new and old[name] != new[name]}


def test_a_search_is_one_stage_and_each_role_a_variant() -> None:
    stages = planned()
    assert ids(stages.stages, StageKind.SEARCH) == ["search/best"]
    assert ids(stages.stages, StageKind.QUANTIZE) == [f"quantize/best-{role}" for role in ("fast", "small", "exact")]
    assert stages["search/best"].needs == ("export", "data/extra", "data/train")
    assert stages["search/best"].own_process
    assert stages["quantize/best-fast"].needs == ("export", "search/best", "data/train")
    assert stages["benchmark/best-fast@cpu"].settings["quantized"] is True
    assert "quantize/best-small" in stages["register"].tolerates


def test_only_the_roles_that_are_kept_become_variants() -> None:
    pipeline = replace(SEARCHED, quantize=(replace(ENTRY, keep=("small",)),))
    assert pipeline.variants() == ("fp32", "best-small")
    assert ids(planned(pipeline).stages, StageKind.QUANTIZE) == ["quantize/best-small"]


def test_it_decides_by_the_metric_that_is_gated() -> None:
    metric = planned()["search/best"].settings["metric"]
    assert isinstance(metric, dict)
    assert (metric["definition"]["name"], metric["lower"]) == ("rmse", True)
    plain = planned(replace(SEARCHED, gates=PIPELINE.gates))["search/best"].settings["metric"]
    assert isinstance(plain, dict)
    assert (plain["definition"]["name"], plain["lower"]) == ("accuracy", False)


def test_what_changes_the_search() -> None:
    again = replace(SEARCHED, quantize=(replace(ENTRY, budget=Budget(metric_drop=0.02)),))
    assert {"search/best", "quantize/best-fast"} <= changed(planned(), planned(again))
    again = replace(SEARCHED, gates=(*PIPELINE.gates, MetricGate(name="mae", max_increase=0.1)))
    assert "search/best" in changed(planned(), planned(again))
    assert "search/best" in changed(planned(), planned(probe=TableProbe({"data": "other"})))
    assert "search/best" in changed(planned(), planned(probe=TableProbe({"optimizers/dynamic": "2.0"})))
    assert "search/best" in changed(planned(), planned(probe=TableProbe({"hardware": "other"})))
    assert "search/best" in changed(planned(), planned(probe=TableProbe({"cpu/vnni": "no"})))


def test_what_is_preferred_changes_only_the_release() -> None:
    preferring = planned(replace(PIPELINE, prefer=Objective(default="size", targets={"edge": "accuracy"})))
    assert changed(planned(PIPELINE), preferring) == {
        "register",
        "promote@cpu",
        "promote@edge",
        "deploy/digits",
        "deploy/digits-edge",
    }
    policies = preferring["register"].settings["policies"]
    assert isinstance(policies, dict)
    assert [policies[name]["prefer"] for name in ("cpu", "edge")] == ["size", "accuracy"]
    assert preferring["gate/fp32@edge"].hints["policy"] == policies["edge"]


def test_the_price_of_a_target_is_measured_by_nothing() -> None:
    dearer = {name: replace(target, price_per_hour=0.5) for name, target in TARGETS.items()}
    assert changed(planned(PIPELINE), plan(PIPELINE, dearer, TableProbe())) == set()
    assert all(target.digest() == TARGETS[name].digest() for name, target in dearer.items())
