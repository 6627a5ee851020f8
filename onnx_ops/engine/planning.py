"""From a pipeline to its plan: which stages, in which order, with which settings and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.measuring import Asked, asked_by
from onnx_ops.domain.metric import ACCURACY
from onnx_ops.domain.pipeline import (
    EXPORT,
    Attempts,
    DataSection,
    Environment,
    Pipeline,
    Plan,
    Quantize,
    Stage,
    StageKind,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.recipes import Arithmetic
from onnx_ops.domain.target import Target

REVISIONS: Mapping[StageKind, int] = {
    **dict.fromkeys(StageKind, 1),
    StageKind.EXPORT: 3,
    StageKind.VALIDATE: 3,
    StageKind.QUANTIZE: 4,
    StageKind.BENCHMARK: 5,
    StageKind.GATE: 3,
    StageKind.REGISTER: 4,
}
"""Raised by one when the code of a stage changes what it produces from the same inputs."""


class Probe(Protocol):
    """Cheap questions a plan asks of the world. No answer imports a framework."""

    def data(self, section: DataSection) -> str:
        """Fingerprint of a data set."""
        ...

    def code(self, reference: str, depends: tuple[str, ...]) -> Digest: ...

    def model(self, path: str) -> Digest:
        """Digest of a model file or folder that the pipeline brings."""
        ...

    def tools(self, kind: str, name: str) -> Mapping[str, str]:
        """Versions of the distributions that shape what a plugin produces."""
        ...

    def is_quantizer(self, name: str) -> bool: ...

    def hardware(self, target: Target) -> Digest: ...

    def arithmetic(self, target: Target) -> Arithmetic:
        """How the machine of a target computes in few bits."""
        ...

    def signer(self) -> Digest | None:
        """Key that signs decisions; None where runs stop at the gates."""
        ...


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
        stages += _release(pipeline, targets, probe)
    order = list(StageKind)
    last = len(order) if until is None else order.index(until)
    return Plan(pipeline=pipeline.pipeline, stages=tuple(s for s in stages if order.index(s.kind) <= last))


def data_id(name: str) -> str:
    return f"data/{name}"


def variant_id(variant: str) -> str:
    return "export" if variant == EXPORT else f"quantize/{variant}"


def benchmark_id(variant: str, target: str) -> str:
    return f"benchmark/{variant}@{target}"


def gate_id(variant: str, target: str) -> str:
    return f"gate/{variant}@{target}"


def _stage(
    kind: StageKind, stage_id: str, section: Attempts | None, settings: Mapping[str, Json], **rest: object
) -> Stage:
    """A stage whose attempts come from its section; they do not shape the result and stay out of the settings."""
    return codec.from_json(
        {
            "id": stage_id,
            "kind": kind.value,
            "settings": {**settings, "revision": REVISIONS[kind]},
            "retries": section.retries if section else 0,
            "timeout": section.timeout if section else None,
            **rest,
        },
        Stage,
    )


def _section(section: Attempts) -> dict[str, Json]:
    """A section without what only concerns its attempts, and without its environment, which `_env` tells."""
    document = codec.to_json(section)
    return {key: value for key, value in document.items() if key not in ("retries", "timeout", "env")}


def _env(env: Environment | None) -> tuple[dict[str, Json], dict[str, Json]]:
    """Settings and hints of a stage that runs in an environment of its own; none where the exporter decides."""
    if env is None:
        return {}, {}
    return {"env": env.content()}, {"env": codec.to_json(env)}


def _source(pipeline: Pipeline, probe: Probe) -> list[Stage]:
    stages = [
        _stage(
            StageKind.DATA,
            data_id(name),
            None,
            {"section": codec.to_json(section), "fingerprint": probe.data(section)},
        )
        for name, section in pipeline.data.items()
    ]
    scored = pipeline.validate.samples.data
    framework = pipeline.export.framework
    env, hints = _env((pipeline.train.env if pipeline.train else None) or pipeline.export.env)
    if pipeline.train is not None:
        code = probe.code(pipeline.train.run, pipeline.train.depends)
        settings: dict[str, Json] = {**_section(pipeline.train), "code": code, "framework": framework}
        needs = [data_id(name) for name in pipeline.data if name != scored]
    else:
        brought = pipeline.model or ""
        settings = {"model": brought, "digest": probe.model(brought), "framework": framework}
        needs = []
    tools = probe.tools("exporters", framework)
    # A user's code may crash, or be edited while this process lives: it runs in a process of its own.
    own = pipeline.train is not None
    stages.append(
        _stage(
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
    samples = pipeline.validate.samples
    scored = data_id(samples.data)
    tools = probe.tools("exporters", pipeline.export.framework)
    env, hints = _env(pipeline.export.env)
    export: dict[str, Json] = {
        "section": _section(pipeline.export),
        "limit": samples.limit,
        "data": samples.data,
        "pipeline": pipeline.pipeline,
        **env,
    }
    machines = _machines(pipeline.benchmark.targets, targets, probe)
    validate: dict[str, Json] = {"section": _section(pipeline.validate), "export": _section(pipeline.export)}
    return [
        _stage(
            StageKind.EXPORT,
            "export",
            pipeline.export,
            export,
            needs=["train", scored],
            tools=tools,
            variant=EXPORT,
            hints=hints,
        ),
        _stage(
            StageKind.VALIDATE,
            "validate",
            pipeline.validate,
            validate,
            needs=["export", "train"],
            tools=probe.tools("runtimes", "onnxruntime"),
            variant=EXPORT,
            hints=hints,
        ),
        *(_quantize(entry, machines, probe) for entry in pipeline.quantize),
    ]


def _machines(names: Iterable[str], targets: Mapping[str, Target], probe: Probe) -> list[Json]:
    """The kinds of machine that a variant is made for, each once: recipes follow them."""
    kinds = [codec.to_json(probe.arithmetic(targets[name])) for name in names]
    return sorted((kind for at, kind in enumerate(kinds) if kind not in kinds[:at]), key=_plain)


def _quantize(entry: Quantize, machines: Sequence[Json], probe: Probe) -> Stage:
    calibration = [data_id(entry.calibrate.data)] if entry.calibrate else []
    return _stage(
        StageKind.QUANTIZE,
        variant_id(entry.name),
        entry,
        {"section": _section(entry), "quantized": probe.is_quantizer(entry.method), "machines": list(machines)},
        needs=["export", *calibration],
        tools=probe.tools("optimizers", entry.method),
        variant=entry.name,
    )


def _judged(pipeline: Pipeline, target: Target, variant: str, probe: Probe) -> list[Stage]:
    quantized = any(q.name == variant and probe.is_quantizer(q.method) for q in pipeline.quantize)
    model = pipeline.register.model if pipeline.register else ""
    asked = asked_by(pipeline.gates)
    measure: dict[str, Json] = {
        "pipeline": pipeline.pipeline,
        "model": model,
        "target": codec.to_json(target),
        "hardware": probe.hardware(target),
        "batch": pipeline.benchmark.batch,
        "limit": pipeline.validate.samples.limit,
        "data": pipeline.validate.samples.data,
        "quantized": quantized,
        "source": variant_id(variant),
        **_measurements(asked),
        "metrics": _metrics(pipeline, probe),
    }
    needs = ["export", "validate", variant_id(variant), data_id(pipeline.validate.samples.data)]
    gates: Json = [codec.to_json(gate) for gate in pipeline.gates]
    return [
        _stage(
            StageKind.BENCHMARK,
            benchmark_id(variant, target.name),
            pipeline.benchmark,
            measure,
            needs=list(dict.fromkeys(needs)),
            tools=probe.tools("runtimes", target.runtime),
            variant=variant,
            target=target.name,
            own_process=True,
            hints={"tolerances": codec.to_json(asked)["tolerances"]},
        ),
        _stage(
            StageKind.GATE,
            gate_id(variant, target.name),
            None,
            {"gates": gates, "model": model, "signer": probe.signer()},
            needs=[benchmark_id(variant, target.name)],
            variant=variant,
            target=target.name,
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
        {"definition": codec.to_json(one), "code": probe.code(one.use, ()) if one.use else None}
        for one in sorted(asked, key=lambda one: one.label)
    ]


def _release(pipeline: Pipeline, targets: Mapping[str, Target], probe: Probe) -> list[Stage]:
    section = pipeline.register
    if section is None:
        return []
    names = pipeline.benchmark.targets
    pairs = [(variant, target) for target in names for variant in pipeline.variants()]
    register = _stage(
        StageKind.REGISTER,
        "register",
        section,
        {
            "model": section.model,
            "pipeline": pipeline.pipeline,
            "variants": [{"name": v, "stage": variant_id(v)} for v in pipeline.variants()],
            "targets": list(names),
            "parameters": _parameters(pipeline),
            "measured_on": pipeline.validate.samples.data,
        },
        needs=["train", "export"],
        tolerates=[
            *(data_id(name) for name in pipeline.data),
            *(variant_id(v) for v in pipeline.variants() if v != EXPORT),
            *(benchmark_id(*pair) for pair in pairs),
            *(gate_id(*pair) for pair in pairs),
        ],
    )
    promotes = [
        _stage(
            StageKind.PROMOTE,
            f"promote@{name}",
            None,
            {"endpoints": _endpoints(pipeline, name)},
            needs=["register"],
            target=name,
        )
        for name in names
        if section.promote == "auto"
    ]
    deploys = [
        _stage(
            StageKind.DEPLOY,
            f"deploy/{entry.endpoint}",
            entry,
            {
                "section": _section(entry),
                "model": section.model,
                "pipeline": pipeline.pipeline,
                "target_digest": targets[entry.target].digest(),
                "auto": section.promote == "auto",
            },
            needs=["register", *(p.id for p in promotes if p.target == entry.target)],
            target=entry.target,
        )
        for entry in pipeline.deploy
    ]
    return [register, *promotes, *deploys]


def _parameters(pipeline: Pipeline) -> dict[str, Json]:
    """How the model was made, recorded with its versions."""
    recorded: dict[str, Json] = {
        "export.framework": pipeline.export.framework,
        "export.opset": str(pipeline.export.opset),
    }
    if pipeline.train is None:
        return recorded | {"model": pipeline.model}
    values = {f"train.{name}": value for name, value in pipeline.train.with_.items()}
    return {**recorded, "train.run": pipeline.train.run, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _endpoints(pipeline: Pipeline, target: str) -> list[Json]:
    return [entry.endpoint for entry in pipeline.deploy if entry.target == target]
