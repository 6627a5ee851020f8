"""From a pipeline to its stages: their selection, their order, and their keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onnx_ops import codec, plugins
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Objective
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.gate import (
    ColdStartGate,
    Gate,
    LatencyGate,
    MemoryGate,
    MetricGate,
    SizeGate,
    ThroughputGate,
)
from onnx_ops.domain.pipeline import (
    Calibrate,
    Export,
    FileData,
    Pipeline,
    Quantize,
    Register,
    Samples,
    Validate,
)
from onnx_ops.domain.plan import Plan, StageKind
from onnx_ops.domain.quantization import Budget, TuningData
from onnx_ops.pipeline import InlineExecutor, plan, run
from onnx_ops.ports import Observer
from onnx_ops.testing.fakes import FakeClock
from tests.pipeline.plan_parts import PIPELINE, TARGETS, CountingHandler, TableProbe, ids

VARIANTS = ("fp32", "int8-dynamic", "int8-static")


def planned(
    pipeline: Pipeline = PIPELINE, probe: TableProbe | None = None, until: StageKind | None = None
) -> Plan:
    return plan(pipeline, TARGETS, probe or TableProbe(), until=until)


def keys(some: Plan) -> dict[str, Digest]:
    """Return the key of every stage of a run without cached results."""
    result = run(
        some,
        handler=CountingHandler(),
        executor=InlineExecutor(),
        observer=Observer(),
        clock=FakeClock(),
    )
    return {
        name: outcome.key for name, outcome in result.outcomes.items() if outcome.key is not None
    }


def changed(before: Plan, after: Plan) -> set[str]:
    old, new = keys(before), keys(after)
    assert set(old) == set(new)
    return {name for name, key in new.items() if old[name] != key}


def test_codec_of_pipeline_restores_equal_pipeline() -> None:
    assert codec.loads(codec.dumps(PIPELINE), Pipeline) == PIPELINE


def test_plan_of_full_pipeline_contains_all_stages() -> None:
    stages = planned().stages
    assert ids(stages, StageKind.DATA) == ["data/train", "data/test", "data/extra"]
    assert ids(stages, StageKind.QUANTIZE) == ["quantize/int8-dynamic", "quantize/int8-static"]
    pairs = [f"{variant}@{target}" for target in ("cpu", "edge") for variant in VARIANTS]
    assert ids(stages, StageKind.BENCHMARK) == [f"benchmark/{pair}" for pair in pairs]
    assert ids(stages, StageKind.GATE) == [f"gate/{pair}" for pair in pairs]
    assert ids(stages, StageKind.PROMOTE) == ["promote@cpu", "promote@edge"]
    assert ids(stages, StageKind.DEPLOY) == ["deploy/digits", "deploy/digits-edge"]
    assert len(stages) == 3 + 1 + 1 + 1 + 2 + 6 + 6 + 1 + 2 + 2


def test_plan_lists_stages_after_their_dependencies() -> None:
    seen: set[str] = set()
    for stage in planned().stages:
        assert seen >= {*stage.needs, *stage.tolerates}
        assert stage.id not in seen
        seen.add(stage.id)


def test_plan_of_full_pipeline_sets_needs_and_tolerates() -> None:
    stages = planned()
    assert stages["train"].needs == ("data/train", "data/extra"), "training uses no scored data"
    assert stages["quantize/int8-static"].needs == ("export", "data/train")
    assert stages["quantize/int8-dynamic"].needs == ("export",)
    assert stages["benchmark/fp32@cpu"].needs == ("export", "validate", "data/test")
    needs = {"export", "validate", "quantize/int8-static", "data/test"}
    assert set(stages["benchmark/int8-static@edge"].needs) == needs
    assert stages["benchmark/fp32@cpu"].own_process
    assert stages["register"].needs == ("train", "export")
    assert {"gate/int8-static@edge", "quantize/int8-dynamic"} <= set(stages["register"].tolerates)
    assert stages["deploy/digits"].needs == ("register",)
    assert stages["deploy/digits"].tolerates == ("promote@cpu",)


def test_plan_with_user_model_needs_no_training_data() -> None:
    brought = planned(replace(PIPELINE, train=None, model="models/m.onnx"))["train"]
    assert brought.needs == ()
    assert brought.settings["model"] == "models/m.onnx"


def test_plan_without_key_or_register_section_ends_before_release_stages() -> None:
    last = (StageKind.REGISTER, StageKind.PROMOTE, StageKind.DEPLOY)
    for some in (
        planned(probe=TableProbe(key=None)),
        planned(replace(PIPELINE, register=None, deploy=())),
    ):
        assert not [stage for stage in some.stages if stage.kind in last]


def test_plan_with_manual_promotion_has_no_promote_stage() -> None:
    some = planned(replace(PIPELINE, register=Register(model="digits")))
    assert not ids(some.stages, StageKind.PROMOTE)
    assert some["deploy/digits"].needs == ("register",)


@pytest.mark.parametrize("until", StageKind)
def test_plan_until_stage_omits_later_stages(until: StageKind) -> None:
    order = list(StageKind)
    kinds = {stage.kind for stage in planned(until=until).stages}
    assert kinds == set(order[: order.index(until) + 1]) & {
        stage.kind for stage in planned().stages
    }


def with_section(name: str, **values: object) -> Pipeline:
    return replace(PIPELINE, **{name: replace(getattr(PIPELINE, name), **values)})


@pytest.mark.parametrize(
    "section", ["train", "export", "validate", "benchmark", "register", "quantize", "deploy"]
)
def test_stage_key_ignores_retries_and_timeout(section: str) -> None:
    attempts: dict[str, Any] = {"retries": 3, "timeout": 60.0}
    entries: Any = getattr(PIPELINE, section)
    if isinstance(entries, tuple):
        changes: dict[str, Any] = {section: tuple(replace(entry, **attempts) for entry in entries)}
        patient = planned(replace(PIPELINE, **changes))
    else:
        patient = planned(with_section(section, **attempts))
    assert not changed(planned(), patient)
    assert any((stage.retries, stage.timeout) == (3, 60.0) for stage in patient.stages)


RELEASE = {"register", "promote@cpu", "promote@edge", "deploy/digits", "deploy/digits-edge"}


def pairs_of(*kinds: str) -> set[str]:
    return {
        f"{kind}/{variant}@{target}" for kind in kinds for variant in VARIANTS for target in TARGETS
    }


def plan_with(*gates: Gate, probe: TableProbe | None = None) -> Plan:
    return planned(replace(PIPELINE, gates=gates), probe)


BENCHMARKS = pairs_of("benchmark")


def own(**limits: Any) -> MetricGate:
    return MetricGate(use="own:score", **limits)


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        (MetricGate(name="f1", min=0.5), MetricGate(name="f1", max_drop=0.01, min=0.6), False),
        (MetricGate(name="top_k", min=0.5), MetricGate(name="top_k", k=5, min=0.4), False),
        (SizeGate(max=1), MetricGate(max_drop=0.01), False),
        (own(higher_is_better=True, min=0.5), own(higher_is_better=False, max=1.0), False),
        (SizeGate(max=1), MetricGate(name="f1", min=0.5), True),
        (MetricGate(name="f1", min=0.5), MetricGate(name="f1", average="micro", min=0.5), True),
        (MetricGate(name="top_k", k=3, min=0.5), MetricGate(name="top_k", k=4, min=0.5), True),
        (MetricGate(name="auc", min=0.5), MetricGate(name="auc", output="scores", min=0.5), True),
    ],
)
def test_benchmark_key_changes_with_metric_but_not_with_limits(
    before: Gate, after: Gate, again: bool
) -> None:
    assert changed(plan_with(before), plan_with(after)) & BENCHMARKS == (
        BENCHMARKS if again else set()
    )


def test_benchmark_settings_depend_on_code_of_custom_metric() -> None:
    gate = own(higher_is_better=True, min=0.5)
    edited = TableProbe(world={"code": "edited"})
    before, after = (
        plan_with(gate, probe=probe)["benchmark/fp32@cpu"] for probe in (TableProbe(), edited)
    )
    assert before.settings["metrics"] != after.settings["metrics"]


def test_keys_of_scores_and_benchmark_depend_on_code_of_decoder() -> None:
    gate = MetricGate(name="wer", decode="own:transcribe", max=0.1)
    sharded = replace(PIPELINE, gates=(gate,), benchmark=replace(PIPELINE.benchmark, shards=2))
    edited = TableProbe(world={"code": "edited"})
    stages = changed(planned(sharded), planned(sharded, edited))
    assert stages >= BENCHMARKS | {"score/fp32@cpu#1", "score/fp32@cpu#2"}


def test_benchmark_tools_contain_version_of_gated_metric_package() -> None:
    gate = MetricGate(name="wer", max=0.1)
    assert plan_with(gate)["benchmark/fp32@cpu"].tools["jiwer"] == plugins.version("jiwer")
    assert "jiwer" not in planned()["benchmark/fp32@cpu"].tools


def test_benchmark_key_ignores_order_of_metric_gates() -> None:
    gates = (MetricGate(name="f1", min=0.5), MetricGate(name="auc", min=0.5))
    assert not changed(plan_with(*gates), plan_with(*reversed(gates))) & BENCHMARKS


def test_change_to_size_gate_changes_gate_keys_but_no_benchmark_keys() -> None:
    other = planned(replace(PIPELINE, gates=(SizeGate(max=999),)))
    assert changed(planned(), other) == pairs_of("gate") | RELEASE


def test_benchmark_settings_follow_kinds_of_gates_but_not_limits() -> None:
    without = plan_with(SizeGate(max=9))
    assert not {"throughput", "starts"} & set(without["benchmark/fp32@cpu"].settings)
    loaded = plan_with(
        SizeGate(max=9), ThroughputGate(concurrency=8, min=5.0), ThroughputGate(min=1.0)
    )
    assert loaded["benchmark/fp32@cpu"].settings["throughput"] == [4, 8]
    assert changed(without, loaded) == pairs_of("benchmark", "gate") | RELEASE
    started = plan_with(SizeGate(max=9), MemoryGate(max=5))
    assert started["benchmark/fp32@cpu"].settings["starts"] is True
    assert (
        changed(started, plan_with(MemoryGate(max=6, max_regression=0.1)))
        == pairs_of("gate") | RELEASE
    )
    both = plan_with(ColdStartGate(load=1.0), MemoryGate(max=6))
    assert not changed(started, both) & pairs_of("benchmark"), "both gates use the same processes"


def test_gates_of_target_apply_only_to_that_target() -> None:
    limited = TARGETS | {
        "edge": replace(TARGETS["edge"], gates=(SizeGate(max=5), MemoryGate(max=7)))
    }
    plain, found = planned(), plan(PIPELINE, limited, TableProbe())
    there: Any = found["gate/fp32@edge"].settings["gates"]
    assert [(gate["kind"], gate.get("max")) for gate in there] == [
        ("latency", None),
        ("size", 5),
        ("memory", 7),
    ]
    assert found["gate/fp32@cpu"].settings == plain["gate/fp32@cpu"].settings
    assert found["benchmark/fp32@edge"].settings["starts"] is True
    assert {name for name in changed(plain, found) if name.endswith("@cpu")} <= RELEASE
    looser = TARGETS | {
        "edge": replace(TARGETS["edge"], gates=(SizeGate(max=6), MemoryGate(max=8)))
    }
    again = changed(found, plan(PIPELINE, looser, TableProbe()))
    assert not again & pairs_of("benchmark"), "another limit repeats no measurement"


def test_benchmark_hints_contain_tolerances_of_gates() -> None:
    stage = plan_with(LatencyGate(max_regression=0.05), ThroughputGate(max_regression=0.1))[
        "benchmark/fp32@cpu"
    ]
    assert stage.hints["tolerances"] == {"latency": [0.05], "throughput": [0.1]}


def test_gate_keys_change_with_signer() -> None:
    assert (
        changed(planned(), planned(probe=TableProbe(key=Digest("sha256:other"))))
        == pairs_of("gate") | RELEASE
    )


def test_export_key_depends_on_code_of_translation_table() -> None:
    export = Export(framework="torch", options={"translations": "operators:TABLE"})
    pipeline = replace(PIPELINE, export=export, train=None, model="model.pt")
    again = changed(planned(pipeline), planned(pipeline, TableProbe(world={"code": "new"})))
    assert "export" in again
    assert "train" not in again
    plain = replace(pipeline, export=Export(framework="torch"))
    assert not changed(planned(plain), planned(plain, TableProbe(world={"code": "new"})))


def test_changed_training_code_changes_all_later_keys() -> None:
    again = changed(planned(), planned(probe=TableProbe(world={"code": "new"})))
    assert again == {stage.id for stage in planned().stages if stage.kind is not StageKind.DATA}


@pytest.mark.parametrize(
    ("world", "again"),
    [
        (
            {"optimizers/static": "2.0"},
            {"quantize/int8-static", "benchmark/int8-static@cpu", "gate/int8-static@edge"},
        ),
        ({"hardware": "another machine"}, pairs_of("benchmark", "gate")),
    ],
)
def test_changed_tool_or_hardware_changes_dependent_keys_and_keeps_training_and_export(
    world: dict[str, str], again: set[str]
) -> None:
    found = changed(planned(), planned(probe=TableProbe(world=world)))
    assert found >= again | RELEASE
    assert not found & {"train", "export", "quantize/int8-dynamic"}


@pytest.mark.parametrize(
    "change",
    [
        lambda: with_section("train", with_={"epochs": 4}),
        lambda: with_section("export", opset=19),
        lambda: with_section("benchmark", batch=2),
        lambda: replace(PIPELINE, validate=Validate(samples=Samples(limit=7))),
        lambda: replace(
            PIPELINE, data={**PIPELINE.data, "train": FileData(file="t.npz", inputs={"x": "x"})}
        ),
    ],
)
def test_plan_keys_change_with_settings(change: Callable[[], Pipeline]) -> None:
    assert changed(planned(), planned(change()))


def test_benchmark_keys_change_only_for_changed_target() -> None:
    targets = {
        **TARGETS,
        "edge": replace(TARGETS["edge"], session=SessionSettings(intra_op_threads=4)),
    }
    found = changed(planned(), plan(PIPELINE, targets, TableProbe()))
    assert found & BENCHMARKS == {f"benchmark/{v}@edge" for v in VARIANTS}


def test_stage_key_depends_on_its_inputs() -> None:
    stage = planned()["register"]
    handler = CountingHandler()
    one = handler.execute(stage, Digest("a"), {})
    two = handler.execute(stage, Digest("b"), {})
    assert (
        len({stage.key({}), stage.key({"x": one}), stage.key({"x": two}), stage.key({"y": one})})
        == 4
    )


def test_quantize_settings_list_machine_kinds_of_targets() -> None:
    def settings(**world: str) -> Any:
        return planned(probe=TableProbe(world=world))["quantize/int8-static"].settings["machines"]

    alike, mixed = settings(), settings(**{"edge/vnni": "no"})
    assert alike == [codec.to_json(Arithmetic(family="x86"))]
    assert sorted(one["saturates"] for one in mixed) == [False, True]
    assert settings(**{"cpu/vnni": "no"}) == mixed


ENTRY = Quantize(
    name="best",
    method="auto",
    tuning_data=TuningData(data="extra"),
    calibrate=Calibrate(data="train"),
)
SEARCHED = replace(
    PIPELINE, quantize=(ENTRY,), gates=(*PIPELINE.gates, MetricGate(name="rmse", max_increase=0.1))
)


def test_plan_with_search_has_one_search_stage_and_variant_per_role() -> None:
    stages = planned(SEARCHED)
    assert ids(stages.stages, StageKind.SEARCH) == ["search/best"]
    assert ids(stages.stages, StageKind.QUANTIZE) == [
        f"quantize/best-{role}" for role in ("fast", "small", "exact")
    ]
    assert stages["search/best"].needs == ("export", "data/extra", "data/train")
    assert stages["search/best"].own_process
    assert stages["quantize/best-fast"].needs == ("export", "search/best", "data/train")
    assert stages["benchmark/best-fast@cpu"].settings["quantized"] is True
    assert "quantize/best-small" in stages["register"].tolerates


def test_plan_with_selected_search_roles_has_only_their_variants() -> None:
    pipeline = replace(SEARCHED, quantize=(replace(ENTRY, variants=("small",)),))
    assert pipeline.variants() == ("fp32", "best-small")
    assert ids(planned(pipeline).stages, StageKind.QUANTIZE) == ["quantize/best-small"]


def test_search_settings_contain_gated_metric_or_accuracy() -> None:
    for gates, expected in (
        (SEARCHED.gates, ("rmse", True)),
        (PIPELINE.gates, ("accuracy", False)),
    ):
        metric: Any = planned(replace(SEARCHED, gates=gates))["search/best"].settings["metric"]
        assert (metric["definition"]["name"], metric["lower"]) == expected


def test_search_key_changes_with_budget_metric_data_optimizer_and_machine() -> None:
    before = planned(SEARCHED)
    again = replace(SEARCHED, quantize=(replace(ENTRY, budget=Budget(metric_drop=0.02)),))
    assert {"search/best", "quantize/best-fast"} <= changed(before, planned(again))
    again = replace(SEARCHED, gates=(*PIPELINE.gates, MetricGate(name="mae", max_increase=0.1)))
    assert "search/best" in changed(before, planned(again))
    for world in (
        {"data": "other"},
        {"optimizers/dynamic": "2.0"},
        {"hardware": "other"},
        {"cpu/vnni": "no"},
    ):
        assert "search/best" in changed(before, planned(SEARCHED, TableProbe(world=world))), world


def test_changed_objective_changes_only_release_keys() -> None:
    preferring = planned(
        replace(PIPELINE, objective=Objective(default="size", targets={"edge": "accuracy"}))
    )
    assert changed(planned(), preferring) == RELEASE
    policies: Any = preferring["register"].settings["policies"]
    assert [policies[name]["objective"] for name in ("cpu", "edge")] == ["size", "accuracy"]
    assert preferring["gate/fp32@edge"].hints["policy"] == policies["edge"]


def test_changed_price_of_target_changes_no_key() -> None:
    dearer = {name: replace(target, price_per_hour=0.5) for name, target in TARGETS.items()}
    assert changed(planned(), plan(PIPELINE, dearer, TableProbe())) == set()
    assert all(target.digest() == TARGETS[name].digest() for name, target in dearer.items())
