"""The stages that derive variants: one for each recipe, and for a search one more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.metric import ACCURACY, MetricDefinition
from onnx_ops.domain.pipeline import Pipeline, Quantize, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.search import AUTO
from onnx_ops.domain.target import Target
from onnx_ops.pipeline.parts import (
    Probe,
    data_id,
    env_of,
    make_stage,
    operators_of,
    plain,
    search_id,
    section_of,
    variant_id,
)


def derived(pipeline: Pipeline, targets: Mapping[str, Target], probe: Probe) -> list[Stage]:
    """Stages of every entry of `quantize`."""
    machines = _machines(pipeline.benchmark.targets, targets, probe)
    operators, libraries = operators_of(pipeline, targets)
    stages: list[Stage] = []
    for entry in pipeline.quantize:
        if entry.method == AUTO:
            stages += _searched(pipeline, entry, targets, machines, probe)
        else:
            stages.append(_quantize(entry, machines, probe))
    return [
        replace(stage, settings={**stage.settings, **operators}, hints={**stage.hints, **libraries})
        if stage.kind is StageKind.QUANTIZE
        else stage
        for stage in stages
    ]


def _machines(names: Iterable[str], targets: Mapping[str, Target], probe: Probe) -> list[Json]:
    """The kinds of machine that a variant is made for, each once: recipes follow them."""
    kinds = [codec.to_json(probe.arithmetic(targets[name])) for name in names]
    return sorted((kind for at, kind in enumerate(kinds) if kind not in kinds[:at]), key=plain)


def _quantize(entry: Quantize, machines: Sequence[Json], probe: Probe) -> Stage:
    calibration = [data_id(entry.calibrate.data)] if entry.calibrate else []
    env, hints = env_of(entry.env)
    return make_stage(
        StageKind.QUANTIZE,
        variant_id(entry.name),
        entry,
        {
            "section": section_of(probe.settled(entry)),
            "quantized": probe.is_quantizer(entry),
            "machines": list(machines),
            **env,
        },
        needs=["export", *calibration],
        tools=probe.tools("optimizers", entry.method, entry.env),
        variant=entry.name,
        own_process=True,
        hints=hints,
    )


def _searched(
    pipeline: Pipeline, entry: Quantize, targets: Mapping[str, Target], machines: Sequence[Json], probe: Probe
) -> list[Stage]:
    """The search, and a stage for each variant that it may find: which it does is known when it has ended."""
    here = [targets[name] for name in pipeline.benchmark.targets]
    tune = entry.tune
    rows = [data_id(tune.data)] if tune else []
    calibration = [data_id(entry.calibrate.data)] if entry.calibrate else []
    search = make_stage(
        StageKind.SEARCH,
        search_id(entry.name),
        entry,
        {
            "section": section_of(entry),
            "machines": list(machines),
            "targets": [[target.name, target.digest()] for target in here],
            "hardware": [probe.hardware(target) for target in here],
            "batch": pipeline.benchmark.batch,
            "data": tune.data if tune else "",
            "samples": tune.samples if tune else 0,
            "metric": _metric(pipeline, probe),
        },
        needs=list(dict.fromkeys(["export", *rows, *calibration])),
        tools=_tools(here, probe),
        own_process=True,
        hints={"targets": codec.to_json(here)},
    )
    return [
        search,
        *(_role(entry, role, search.id, calibration, probe) for role in dict.fromkeys(entry.keep)),
    ]


def _role(entry: Quantize, role: str, search: str, calibration: Sequence[str], probe: Probe) -> Stage:
    name = f"{entry.name}-{role}"
    return make_stage(
        StageKind.QUANTIZE,
        variant_id(name),
        entry,
        {"section": section_of(entry), "quantized": True, "search": search, "role": role},
        needs=["export", search, *calibration],
        tools=probe.tools("optimizers", "dynamic"),
        variant=name,
        own_process=True,
    )


def _tools(targets: Sequence[Target], probe: Probe) -> dict[str, str]:
    found = dict(probe.tools("optimizers", "dynamic"))
    for target in targets:
        found |= probe.tools("runtimes", target.runtime, target.env)
    return found


def _metric(pipeline: Pipeline, probe: Probe) -> Json:
    """What the search decides by: the metric of the first metric gate, else accuracy."""
    gate = next((gate for gate in pipeline.gates if isinstance(gate, MetricGate)), None)
    definition = gate.definition() if gate else ACCURACY
    better = gate.higher_is_better if gate and gate.use else definition.higher_is_better
    return {
        "definition": codec.to_json(definition),
        "lower": better is False,
        "code": metric_code(pipeline, definition, probe),
    }


def metric_code(pipeline: Pipeline, metric: MetricDefinition, probe: Probe) -> Digest | None:
    """Digest of the code of an own metric; None for one that is known here."""
    if not metric.use:
        return None
    return probe.code(metric.use, pipeline.train.depends if pipeline.train else ()).digest()


def is_quantized(pipeline: Pipeline, variant: str, probe: Probe) -> bool:
    """Whether a variant differs from the export by design."""
    entry = next((one for one in pipeline.quantize if variant in one.variants()), None)
    return entry is not None and (entry.method == AUTO or probe.is_quantizer(entry))
