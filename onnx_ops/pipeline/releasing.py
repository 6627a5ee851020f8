"""The stages of a release: registration, promotion, endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onnx_ops import codec
from onnx_ops.domain.pipeline import EXPORT, Pipeline, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.standing import Policy
from onnx_ops.domain.target import Target
from onnx_ops.pipeline.parts import benchmark_id, data_id, gate_id, make_stage, plain, section_of, variant_id


def release(pipeline: Pipeline, targets: Mapping[str, Target]) -> list[Stage]:
    section = pipeline.register
    if section is None:
        return []
    names = pipeline.benchmark.targets
    pairs = [(variant, target) for target in names for variant in pipeline.variants()]
    register = make_stage(
        StageKind.REGISTER,
        "register",
        section,
        {
            "model": section.model,
            "pipeline": pipeline.pipeline,
            "variants": [{"name": v, "stage": variant_id(v)} for v in pipeline.variants()],
            "targets": list(names),
            "policies": {name: codec.to_json(policy_of(pipeline, targets[name])) for name in names},
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
        hints={"about": pipeline.description},
    )
    promotes = [
        make_stage(
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
        make_stage(
            StageKind.DEPLOY,
            f"deploy/{entry.endpoint}",
            entry,
            {
                "section": section_of(entry),
                "model": section.model,
                "pipeline": pipeline.pipeline,
                "target_digest": targets[entry.target].digest(),
                "auto": section.promote == "auto",
            },
            needs=["register"],
            tolerates=[p.id for p in promotes if p.target == entry.target],
            target=entry.target,
        )
        for entry in pipeline.deploy
    ]
    return [register, *promotes, *deploys]


def policy_of(pipeline: Pipeline, target: Target) -> Policy:
    """What is preferred on a target; its price counts where cost is."""
    prefer = pipeline.prefer.on(target.name)
    return Policy(prefer=prefer, price=target.price_per_hour if prefer == "cost" else None)


def _parameters(pipeline: Pipeline) -> dict[str, Json]:
    """How the model was made, recorded with its versions."""
    recorded: dict[str, Json] = {
        "export.framework": pipeline.export.framework,
        "export.opset": str(pipeline.export.opset),
    }
    recorded |= {f"params.{_recordable(name)}": plain(value) for name, value in pipeline.parameters.items()}
    if pipeline.train is None:
        return recorded | {"model": pipeline.model}
    values = {f"train.{name}": value for name, value in pipeline.train.with_.items()}
    return {**recorded, "train.run": pipeline.train.run, **{name: plain(value) for name, value in values.items()}}


def _recordable(path: str) -> str:
    """A path of `params.yaml` as registries take names: `rates[1]` is `rates.1`."""
    return re.sub(r"[^\w\-. :/]", "_", path.replace("[", ".").replace("]", ""), flags=re.ASCII)


def _endpoints(pipeline: Pipeline, target: str) -> list[Json]:
    return [entry.endpoint for entry in pipeline.deploy if entry.target == target]
