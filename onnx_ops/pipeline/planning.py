"""From a pipeline to its plan: which stages, in which order, with which settings and tools."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.gate import MetricGate, gates_on
from onnx_ops.domain.measuring import Asked, asked_by
from onnx_ops.domain.metric import ACCURACY
from onnx_ops.domain.pipeline import EXPORT, Pipeline, Plan, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Target
from onnx_ops.pipeline.parts import (
    REQUIREMENTS,
    Probe,
    benchmark_id,
    data_id,
    env_of,
    gate_id,
    make_stage,
    operators_of,
    section_of,
    variant_id,
)
from onnx_ops.pipeline.releasing import policy_of, release
from onnx_ops.pipeline.stages.data import source_of
from onnx_ops.pipeline.variants import derived, is_quantized, metric_code


def plan(pipeline: Pipeline, targets: Mapping[str, Target], probe: Probe, *, until: StageKind | None = None) -> Plan:
    """The stages of a pipeline, each after those it needs.

    Args:
        pipeline: a checked pipeline.
        targets: every target that the pipeline names.
        probe: answers what content the plan starts from.
        until: leave out every kind of stage that comes after this one.
    """
    stages = [*_source(pipeline, probe), *_models(pipeline, targets, probe)]
    for name in pipeline.benchmark.targets:
        for variant in pipeline.variants():
            stages += _judged(pipeline, targets[name], variant, probe)
    if pipeline.register is not None and probe.signer() is not None:
        stages += release(pipeline, targets)
    order = list(StageKind)
    last = len(order) if until is None else order.index(until)
    return Plan(pipeline=pipeline.pipeline, stages=tuple(s for s in stages if order.index(s.kind) <= last))


def _source(pipeline: Pipeline, probe: Probe) -> list[Stage]:
    stages = [
        make_stage(
            StageKind.DATA,
            data_id(name),
            None,
            {"section": codec.to_json(section), "fingerprint": probe.data(section)},
            tools=probe.tools("data", source_of(section)),
        )
        for name, section in pipeline.data.items()
    ]
    scored = pipeline.validate.samples.data
    framework = pipeline.export.framework
    wanted = (pipeline.train.env if pipeline.train else None) or pipeline.export.env
    env, hints = env_of(wanted)
    tools = probe.tools("exporters", framework, wanted, trains=True)
    if pipeline.train is not None:
        code = probe.code(pipeline.train.run, pipeline.train.depends)
        settings: dict[str, Json] = {
            **section_of(pipeline.train),
            "code": digest_json(dict(code.files)),
            "framework": framework,
        }
        tools = {**tools, **({} if REQUIREMENTS in tools else code.packages)}
        needs = [data_id(name) for name in pipeline.data if name != scored]
    else:
        brought = pipeline.model or ""
        settings = {"model": brought, "digest": probe.model(brought), "framework": framework}
        needs = []
    # A user's code may crash, or be edited while this process lives: it runs in a process of its own.
    own = pipeline.train is not None
    stages.append(
        make_stage(
            StageKind.TRAIN,
            "train",
            pipeline.train,
            settings | env,
            needs=needs,
            tools=tools,
            own_process=own,
            hints=hints,
        )
    )
    return stages


def _models(pipeline: Pipeline, targets: Mapping[str, Target], probe: Probe) -> list[Stage]:
    """Converters, quantizers and the runtime may take their process down: each stage has its own."""
    samples = pipeline.validate.samples
    scored = data_id(samples.data)
    tools = probe.tools("exporters", pipeline.export.framework, pipeline.export.env)
    env, hints = env_of(pipeline.export.env)
    operators, libraries = operators_of(pipeline, targets)
    hints |= libraries
    origins = {name: dict(probe.origin(section)) for name, section in pipeline.data.items()}
    if known := {name: told for name, told in origins.items() if told}:
        hints["origins"] = known
    export: dict[str, Json] = {
        "section": section_of(pipeline.export),
        "limit": samples.limit,
        "data": samples.data,
        "inputs": codec.to_json(pipeline.inputs),
        "source_time": pipeline.validate.source_time,
        "pipeline": pipeline.pipeline,
        **env,
        **operators,
    }
    if table := pipeline.export.translations:  # validation rests on the export, and needs the code for tracing only
        depends = pipeline.train.depends if pipeline.train else ()
        export["translations"] = probe.code(table, depends).digest()
    validate: dict[str, Json] = {
        "section": section_of(pipeline.validate),
        "export": section_of(pipeline.export),
        **operators,
    }
    return [
        make_stage(
            StageKind.EXPORT,
            "export",
            pipeline.export,
            export,
            needs=["train", scored],
            tools=tools,
            variant=EXPORT,
            own_process=True,
            hints=hints,
        ),
        make_stage(
            StageKind.VALIDATE,
            "validate",
            pipeline.validate,
            validate,
            needs=["export", "train"],
            tools=probe.tools("runtimes", "onnxruntime"),
            variant=EXPORT,
            own_process=True,
            hints=hints,
        ),
        *derived(pipeline, targets, probe),
    ]


def _judged(pipeline: Pipeline, target: Target, variant: str, probe: Probe) -> list[Stage]:
    model = pipeline.register.model if pipeline.register else ""
    limits = gates_on(pipeline.gates, target.gates)
    asked = asked_by(limits)
    measure: dict[str, Json] = {
        "pipeline": pipeline.pipeline,
        "model": model,
        "target": target.digest(),
        "hardware": probe.hardware(target),
        "batch": pipeline.benchmark.batch,
        "limit": pipeline.validate.samples.limit,
        "data": pipeline.validate.samples.data,
        "quantized": is_quantized(pipeline, variant, probe),
        "source": variant_id(variant),
        **_measurements(asked),
        "metrics": _metrics(pipeline, probe),
    }
    needs = ["export", "validate", variant_id(variant), data_id(pipeline.validate.samples.data)]
    gates: Json = [codec.to_json(gate) for gate in limits]
    declared: dict[str, Json] = {
        "custom_ops": sorted(library.digest for library in target.custom_ops),
        "execution": codec.to_json(target.execution),
    }
    return [
        make_stage(
            StageKind.BENCHMARK,
            benchmark_id(variant, target.name),
            pipeline.benchmark,
            measure,
            needs=list(dict.fromkeys(needs)),
            tools=probe.tools("runtimes", target.runtime, target.env),
            variant=variant,
            target=target.name,
            own_process=True,
            hints={
                "target": codec.to_json(target),
                "tolerances": codec.to_json(asked)["tolerances"],
                "judged": [gate.definition().label for gate in limits if isinstance(gate, MetricGate)],
            },
        ),
        make_stage(
            StageKind.GATE,
            gate_id(variant, target.name),
            None,
            {"gates": gates, "model": model, "signer": probe.signer(), **declared},
            needs=[benchmark_id(variant, target.name)],
            variant=variant,
            target=target.name,
            hints={"policy": codec.to_json(policy_of(pipeline, target))},
        ),
    ]


def _measurements(asked: Asked) -> dict[str, Json]:
    """Those that are only made where a gate judges them. Limits change none, so they stay out of the key."""
    levels: dict[str, Json] = {"throughput": list(asked.throughput)} if asked.throughput else {}
    return {**levels, "starts": True} if asked.starts else levels


def _metrics(pipeline: Pipeline, probe: Probe) -> list[Json]:
    """What the metric gates want measured, without their limits; accuracy is measured wherever it can be."""
    asked = {gate.definition() for gate in pipeline.gates if isinstance(gate, MetricGate)} | {ACCURACY}
    return [
        {"definition": codec.to_json(one), "code": metric_code(pipeline, one, probe)}
        for one in sorted(asked, key=lambda one: one.label)
    ]
