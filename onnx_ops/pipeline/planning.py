"""Plan a pipeline: its stages in order, with their settings, tools and hints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.decision import TargetObjective
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.gate import (
    ACCURACY,
    Gate,
    MetricDefinition,
    SlicesGate,
    TaskMetricGate,
    derive_measurement_request,
    select_gates,
)
from onnx_ops.domain.pipeline import DataSection, FileData, Pipeline, Quantize, Slices
from onnx_ops.domain.plan import PLACEABLE, Plan, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.quantization import AUTO
from onnx_ops.domain.target import Target
from onnx_ops.pipeline.probe import ProjectProbe
from onnx_ops.pipeline.stage_settings import (
    REQUIREMENTS,
    SYSTEM,
    as_json_text,
    data_id,
    make_stage,
    stage_id,
    tags_id,
    variant_id,
    write_environment,
    write_operators,
    write_section,
)
from onnx_ops.pipeline.stages.data import get_source_name


def plan(
    pipeline: Pipeline,
    targets: Mapping[str, Target],
    probe: ProjectProbe,
    *,
    until: StageKind | None = None,
) -> Plan:
    """Return the stages of a checked pipeline, up to the kind `until`.

    Each stage comes after those that it needs. The stages of a release are planned only if the
    pipeline registers models and signs decisions.
    """
    stages = [*_plan_sources(pipeline, probe), *_plan_models(pipeline, targets, probe)]
    for name in pipeline.benchmark.targets:
        for variant in pipeline.variants():
            stages += _plan_judgement(pipeline, targets[name], variant, probe)
    if pipeline.register is not None and probe.signer() is not None:
        stages += plan_release(pipeline, targets)
    hints: dict[str, Json] = {"pipeline": pipeline.pipeline}
    # The machine of a stage needs these files, because user code reads them.
    if pipeline.train is not None and pipeline.train.depends:
        hints["depends"] = list(pipeline.train.depends)
    stages = [replace(s, hints={**s.hints, **hints}) if s.kind in PLACEABLE else s for s in stages]
    order = list(StageKind)
    last = len(order) if until is None else order.index(until)
    return Plan(
        pipeline=pipeline.pipeline, stages=tuple(s for s in stages if order.index(s.kind) <= last)
    )


def _plan_sources(pipeline: Pipeline, probe: ProjectProbe) -> list[Stage]:
    stages = [
        make_stage(
            StageKind.DATA,
            data_id(name),
            None,
            _write_data(section, probe),
            tools=probe.tools("data", get_source_name(section)),
        )
        for name, section in pipeline.data.items()
    ]
    scored = pipeline.validate.samples.data
    if pipeline.slices is not None:
        stages.append(_plan_tags(pipeline, pipeline.slices, probe))
    framework = pipeline.export.framework
    environment = (pipeline.train.env if pipeline.train else None) or pipeline.export.env
    env, hints = write_environment(environment)
    tools = probe.tools("exporters", framework, environment, trains=True)
    if pipeline.train is not None:
        code = probe.code(pipeline.train.run, pipeline.train.depends)
        settings: dict[str, Json] = {
            **write_section(pipeline.train),
            "code": digest_json(dict(code.files)),
            "framework": framework,
        }
        tools = {**tools, **({} if REQUIREMENTS in tools else code.packages)}
        needs = [data_id(name) for name in pipeline.data if name != scored]
    else:
        brought = pipeline.model or ""
        settings = {"model": brought, "digest": probe.model(brought), "framework": framework}
        needs = []
    train = make_stage(
        StageKind.TRAIN,
        "train",
        pipeline.train,
        settings | env,
        needs=needs,
        tools=tools,
        # User code can crash a process. Besides, a long-running process would not see changes of
        # the code.
        own_process=pipeline.train is not None,
        hints=hints,
    )
    return [*stages, train]


def _write_data(section: DataSection, probe: ProjectProbe) -> dict[str, Json]:
    """Return the settings that define the arrays of a data set."""
    # The order of the inputs is part of the data, and canonical JSON sorts keys. The list preserves
    # the order.
    return {
        "section": codec.to_json(section),
        "inputs": list(section.inputs),
        "fingerprint": probe.data(section),
    }


def _plan_tags(pipeline: Pipeline, slices: Slices, probe: ProjectProbe) -> Stage:
    """Plan the stage that finds the slices of the scored rows.

    The values of slices affect no model, so that only benchmarks need this stage.
    """
    section = pipeline.data[pipeline.validate.samples.data]
    depends = pipeline.train.depends if pipeline.train else ()
    return make_stage(
        StageKind.TAGS,
        tags_id(pipeline.validate.samples.data),
        slices,
        {
            **_write_data(section, probe),
            "by": list(slices.by),
            "tags": slices.tags,
            "tags_fingerprint": probe.data(FileData(file=slices.tags)) if slices.tags else "",
            "use": slices.use,
            "code": probe.code(slices.use, depends).digest() if slices.use else "",
        },
        tools=probe.tools("data", get_source_name(section)),
        # User code can crash. It can also be edited while this process runs.
        own_process=bool(slices.use),
    )


def _plan_models(
    pipeline: Pipeline, targets: Mapping[str, Target], probe: ProjectProbe
) -> list[Stage]:
    """Plan export, validation, comparison with the project's code, and variants.

    Each of these stages runs in a separate process, since its libraries can crash.
    """
    samples = pipeline.validate.samples
    scored = data_id(samples.data)
    tools = probe.tools("exporters", pipeline.export.framework, pipeline.export.env)
    env, hints = write_environment(pipeline.export.env)
    operators, libraries = write_operators(pipeline, targets)
    hints |= libraries
    origins = {name: dict(probe.origin(section)) for name, section in pipeline.data.items()}
    if known := {name: origin for name, origin in origins.items() if origin}:
        hints["origins"] = known
    export: dict[str, Json] = {
        "section": write_section(pipeline.export),
        "limit": samples.limit,
        "data": samples.data,
        "inputs": codec.to_json(pipeline.inputs),
        "ordered": _declares_order(pipeline),
        "source_time": pipeline.validate.source_time,
        "pipeline": pipeline.pipeline,
        **env,
        **operators,
    }
    # Only the key of the export contains the code of `translations`: validation needs this code
    # just for tracing.
    if table := pipeline.export.translations:
        depends = pipeline.train.depends if pipeline.train else ()
        export["translations"] = probe.code(table, depends).digest()
    validate: dict[str, Json] = {
        "section": write_section(pipeline.validate),
        "export": write_section(pipeline.export),
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
            hints=hints,
        ),
        *_plan_system(pipeline, targets, probe),
        *plan_variants(pipeline, targets, probe),
    ]


def _plan_system(
    pipeline: Pipeline, targets: Mapping[str, Target], probe: ProjectProbe
) -> list[Stage]:
    """Plan the comparison of the export and its steps with the project's own code."""
    section = pipeline.system
    if section is None:
        return []
    operators, libraries = write_operators(pipeline, targets)
    framework = pipeline.export.framework
    environment = (pipeline.train.env if pipeline.train else None) or pipeline.export.env
    return [
        make_stage(
            StageKind.SYSTEM,
            SYSTEM,
            section,
            {
                "section": write_section(section),
                "content": probe.system(section),
                "framework": framework,
                "isolated": REQUIREMENTS in probe.tools("exporters", framework, environment),
                **operators,
            },
            needs=["export", "train"],  # `system.source` can take the model.
            tools=probe.tools("runtimes", "onnxruntime"),
            variant=EXPORT,
            # User code can crash a process, and can be edited during the run.
            own_process=True,
            hints=libraries,
        )
    ]


def _declares_order(pipeline: Pipeline) -> bool:
    """Return whether all data sets list their inputs or columns in the same order."""
    listed = [
        tuple(section.inputs) or getattr(section, "columns", None) or ()
        for section in pipeline.data.values()
    ]
    return bool(listed) and all(order and order == listed[0] for order in listed)


def _list_metrics(pipeline: Pipeline) -> list[MetricDefinition]:
    """Return accuracy and the metrics that gates judge, sorted by label."""
    metrics = {gate.definition() for gate in pipeline.gates if isinstance(gate, TaskMetricGate)} | {
        ACCURACY
    }
    return sorted(metrics, key=lambda metric: metric.label)


def _plan_judgement(
    pipeline: Pipeline, target: Target, variant: str, probe: ProjectProbe
) -> list[Stage]:
    model = pipeline.register.model if pipeline.register else ""
    limits = _select_gates(pipeline, target)
    request = derive_measurement_request(limits)
    ordered = _list_metrics(pipeline)
    sliced, tags = _write_slices(pipeline, limits)
    placed: dict[str, Json] = {
        "target": codec.to_json(target),
        **({"pool": target.pool} if target.pool else {}),
    }
    scored: dict[str, Json] = {
        "target": target.digest(),
        "hardware": probe.hardware(target),
        "limit": pipeline.validate.samples.limit,
        "data": pipeline.validate.samples.data,
        "source": variant_id(variant),
    }
    measure: dict[str, Json] = {
        **scored,
        "pipeline": pipeline.pipeline,
        "model": model,
        "batch": pipeline.benchmark.batch,
        "quantized": is_quantized(pipeline, variant, probe),
        # Throughput and process starts are measured only if a gate needs them. The limits of the
        # gates affect only how long a comparison is measured, so the key leaves them out.
        **({"throughput": list(request.throughput)} if request.throughput else {}),
        **({"starts": True} if request.starts else {}),
        **sliced,
        # Accuracy is measured even without a gate for it, if the data have suitable labels.
        "metrics": [
            {
                "definition": codec.to_json(metric),
                "code": digest_metric_code(pipeline, metric, probe),
            }
            for metric in ordered
        ],
    }
    samples = data_id(pipeline.validate.samples.data)
    tools = {
        **probe.tools("runtimes", target.runtime, target.env),
        **probe.metric_tools(ordered),
    }
    shards = range(1, pipeline.benchmark.shards + 1) if pipeline.benchmark.shards > 1 else ()
    if shards:
        measure["shards"] = len(shards)
    scores = [
        make_stage(
            StageKind.SCORE,
            stage_id(StageKind.SCORE, variant, target.name, shard),
            pipeline.benchmark,
            {
                **scored,
                "definitions": [codec.to_json(one) for one in ordered],
                **_digest_decoders(pipeline, ordered, probe),
                "shard": shard,
                "shards": len(shards),
            },
            needs=list(dict.fromkeys(["export", variant_id(variant), samples])),
            tools=tools,
            variant=variant,
            target=target.name,
            hints=placed,
        )
        for shard in shards
    ]
    needs = [*_list_comparisons(pipeline), variant_id(variant), samples, *tags]
    needs += [
        stage_id(StageKind.SCORE, name, target.name, shard)
        for name in (EXPORT, variant)
        for shard in shards
    ]
    return [
        *scores,
        make_stage(
            StageKind.BENCHMARK,
            stage_id(StageKind.BENCHMARK, variant, target.name),
            pipeline.benchmark,
            measure,
            needs=list(dict.fromkeys(needs)),
            tools=tools,
            variant=variant,
            target=target.name,
            hints={
                **placed,
                "tolerances": codec.to_json(request)["tolerances"],
                "judged": [
                    gate.definition().label for gate in limits if isinstance(gate, TaskMetricGate)
                ],
                "promotes": pipeline.register is not None and pipeline.register.promote != "manual",
            },
        ),
        _plan_gate(pipeline, target, variant, limits, probe.signer()),
    ]


def _list_comparisons(pipeline: Pipeline) -> list[str]:
    """Return the ids of the export and of the stages that compare it."""
    return ["export", "validate", *([] if pipeline.system is None else [SYSTEM])]


def _digest_decoders(
    pipeline: Pipeline, metrics: Sequence[MetricDefinition], probe: ProjectProbe
) -> dict[str, Json]:
    """Return the digests of the code of each metric that decodes answers.

    A score stage calls only the functions `decode` of metrics. If such a metric has further
    functions, its digest covers them too.
    """
    decoders = [digest_metric_code(pipeline, one, probe) for one in metrics if one.decode]
    return {"code": decoders} if decoders else {}


def _select_gates(pipeline: Pipeline, target: Target) -> list[Gate]:
    """Return the gates on a target.

    A gate on slices without `min_rows` gets that of the section `slices`.
    """
    rows = pipeline.slices.min_rows if pipeline.slices else None
    return [
        replace(gate, min_rows=gate.min_rows or rows) if isinstance(gate, SlicesGate) else gate
        for gate in select_gates(pipeline.gates, target.gates)
    ]


def _write_slices(pipeline: Pipeline, gates: Sequence[Gate]) -> tuple[dict[str, Json], list[str]]:
    """Return settings with the metrics judged in slices, and the stages they need.

    Both are empty unless there are gates on slices and a section `slices`.
    """
    sliced = {gate.definition().label for gate in gates if isinstance(gate, SlicesGate)}
    if pipeline.slices is None or not sliced:
        return {}, []
    return {"slices": sorted(sliced)}, [tags_id(pipeline.validate.samples.data)]


def _plan_gate(
    pipeline: Pipeline, target: Target, variant: str, limits: Sequence[Gate], signer: Json
) -> Stage:
    """Plan the stage that judges the evidence of a benchmark.

    The stage is separate from the benchmark, so that new limits do not require a new measurement.
    """
    return make_stage(
        StageKind.GATE,
        stage_id(StageKind.GATE, variant, target.name),
        None,
        {
            "gates": [codec.to_json(gate) for gate in limits],
            "model": pipeline.register.model if pipeline.register else "",
            "signer": signer,
            "custom_ops": sorted(library.digest for library in target.custom_ops),
            "execution": codec.to_json(target.execution),
        },
        needs=[stage_id(StageKind.BENCHMARK, variant, target.name)],
        variant=variant,
        target=target.name,
        hints={"policy": codec.to_json(get_objective(pipeline, target))},
    )


def plan_variants(
    pipeline: Pipeline, targets: Mapping[str, Target], probe: ProjectProbe
) -> list[Stage]:
    """Plan the stages of every entry of `quantize`."""
    # A recipe depends on the kinds of machines of the targets, not on their number.
    kinds = [codec.to_json(probe.arithmetic(targets[name])) for name in pipeline.benchmark.targets]
    machines = sorted(
        (kind for at, kind in enumerate(kinds) if kind not in kinds[:at]), key=as_json_text
    )
    operators, libraries = write_operators(pipeline, targets)
    stages: list[Stage] = []
    for entry in pipeline.quantize:
        if entry.method == AUTO:
            stages += _plan_search(pipeline, entry, targets, machines, probe)
            continue
        env, hints = write_environment(entry.env)
        settings: dict[str, Json] = {
            "section": write_section(probe.inline_files(entry)),
            "quantized": probe.is_quantizer(entry),
            "machines": list(machines),
            **env,
        }
        make = partial(
            make_stage,
            section=entry,
            tools=probe.tools("optimizers", entry.method, entry.env),
            variant=entry.name,
            hints=hints,
        )
        needs = ["export", *([data_id(entry.calibrate.data)] if entry.calibrate else [])]
        count = entry.calibrate.shards if entry.calibrate else 1
        numbers = range(1, count + 1) if count > 1 else ()
        shards = {
            stage_id(StageKind.CALIBRATE, entry.name, shard=number): number for number in numbers
        }
        for shard, number in shards.items():
            part: dict[str, Json] = {**settings, "shard": number, "shards": count}
            stages.append(make(StageKind.CALIBRATE, shard, settings=part, needs=needs))
        stages.append(
            make(
                StageKind.QUANTIZE,
                variant_id(entry.name),
                settings=settings,
                needs=[*needs, *shards],
            ),
        )
    return [
        replace(stage, settings={**stage.settings, **operators}, hints={**stage.hints, **libraries})
        if stage.kind in (StageKind.CALIBRATE, StageKind.QUANTIZE)
        else stage
        for stage in stages
    ]


def _plan_search(
    pipeline: Pipeline,
    entry: Quantize,
    targets: Mapping[str, Target],
    machines: Sequence[Json],
    probe: ProjectProbe,
) -> list[Stage]:
    """Plan the search, and a stage for each variant that the search can find.

    The stage of a variant copies the result of the search, and measures its quantization error.
    """
    # The search times its trials on one machine: that of the first target, unless the entry names a
    # pool.
    measured = [targets[name] for name in pipeline.benchmark.targets]
    pool, tuning_data = entry.pool or measured[0].pool, entry.tuning_data
    here = [target for target in measured if target.pool == pool]
    calibration = [data_id(entry.calibrate.data)] if entry.calibrate else []
    tools = dict(probe.tools("optimizers", "dynamic"))
    for target in here:
        tools |= probe.tools("runtimes", target.runtime, target.env)
    tools |= probe.metric_tools([_select_search_metric(pipeline)[0]])
    search = make_stage(
        StageKind.SEARCH,
        stage_id(StageKind.SEARCH, entry.name),
        entry,
        {
            "section": write_section(entry),
            "machines": list(machines),
            "targets": [[target.name, target.digest()] for target in here],
            "hardware": [probe.hardware(target) for target in here],
            "batch": pipeline.benchmark.batch,
            "data": tuning_data.data if tuning_data else "",
            "samples": tuning_data.samples if tuning_data else 0,
            "metric": _write_metric(pipeline, probe),
        },
        needs=list(
            dict.fromkeys(
                ["export", *([data_id(tuning_data.data)] if tuning_data else []), *calibration]
            )
        ),
        tools=tools,
        hints={**({"pool": pool} if pool else {}), "targets": codec.to_json(here)},
    )
    roles = [
        make_stage(
            StageKind.QUANTIZE,
            variant_id(f"{entry.name}-{role}"),
            replace(entry, pool=""),
            {"section": write_section(entry), "quantized": True, "search": search.id, "role": role},
            needs=["export", search.id, *calibration],
            tools=probe.tools("optimizers", "dynamic"),
            variant=f"{entry.name}-{role}",
        )
        for role in dict.fromkeys(entry.variants)
    ]
    return [search, *roles]


def _write_metric(pipeline: Pipeline, probe: ProjectProbe) -> Json:
    """Return the metric that the search optimizes.

    It is the metric of the first metric gate, or accuracy if there is no metric gate.
    """
    definition, lower = _select_search_metric(pipeline)
    return {
        "definition": codec.to_json(definition),
        "lower": lower,
        "code": digest_metric_code(pipeline, definition, probe),
    }


def _select_search_metric(pipeline: Pipeline) -> tuple[MetricDefinition, bool]:
    """Return the metric that a search optimizes, and whether lower values are better."""
    gate = next((gate for gate in pipeline.gates if isinstance(gate, TaskMetricGate)), None)
    return (ACCURACY, False) if gate is None else (gate.definition(), gate.lower_is_better)


def digest_metric_code(
    pipeline: Pipeline, metric: MetricDefinition, probe: ProjectProbe
) -> Digest | None:
    """Return the digest of the functions that a metric calls; None if it calls none."""
    depends = pipeline.train.depends if pipeline.train else ()
    digests = [probe.code(reference, depends).digest() for reference in metric.functions]
    return digest_json(digests) if len(digests) > 1 else next(iter(digests), None)


def is_quantized(pipeline: Pipeline, variant: str, probe: ProjectProbe) -> bool:
    """Return whether a variant differs from the export by design.

    A variant of a search (`method: auto`) is treated as quantized, even if the search selects a
    recipe without quantization.
    """
    entry = next((one for one in pipeline.quantize if variant in one.variant_names()), None)
    return entry is not None and (entry.method == AUTO or probe.is_quantizer(entry))


def plan_release(pipeline: Pipeline, targets: Mapping[str, Target]) -> list[Stage]:
    """Plan the stages of a release: registration, promotion, endpoints."""
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
            "policies": {
                name: codec.to_json(get_objective(pipeline, targets[name])) for name in names
            },
            "parameters": _list_parameters(pipeline),
            "measured_on": pipeline.validate.samples.data,
        },
        needs=["train", "export"],
        tolerates=[
            *(data_id(name) for name in pipeline.data),
            *([] if pipeline.system is None else [SYSTEM]),
            *(variant_id(v) for v in pipeline.variants() if v != EXPORT),
            *(stage_id(StageKind.BENCHMARK, *pair) for pair in pairs),
            *(stage_id(StageKind.GATE, *pair) for pair in pairs),
        ],
        hints={"about": pipeline.description},
    )
    promotes = _plan_promotions(pipeline, section.promote)
    deploys = [
        make_stage(
            StageKind.DEPLOY,
            f"deploy/{entry.endpoint}",
            entry,
            {
                "section": write_section(entry),
                "model": section.model,
                "pipeline": pipeline.pipeline,
                "target_digest": targets[entry.target].digest(),
                "auto": section.promote != "manual",
            },
            needs=["register"],
            tolerates=[p.id for p in promotes if p.target == entry.target],
            target=entry.target,
        )
        for entry in pipeline.deploy
    ]
    return [register, *promotes, *deploys]


def _list_parameters(pipeline: Pipeline) -> dict[str, Json]:
    """Return the parameters that the registry records for a release.

    They are the framework and the opset of the export, and the parameters of the pipeline. The
    training function with its arguments, or the existing model, is also recorded.
    """
    recorded: dict[str, Json] = {
        "export.framework": pipeline.export.framework,
        "export.opset": str(pipeline.export.opset),
    }
    for path, value in pipeline.parameters.items():
        # MLflow rejects brackets in the names of parameters.
        name = re.sub(r"[^\w\-. :/]", "_", path.replace("[", ".").replace("]", ""), flags=re.ASCII)
        recorded[f"params.{name}"] = as_json_text(value)
    if pipeline.train is None:
        recorded["model"] = pipeline.model
    else:
        recorded["train.run"] = pipeline.train.run
        recorded |= {
            f"train.{name}": as_json_text(value) for name, value in pipeline.train.with_.items()
        }
    return recorded


def _plan_promotions(pipeline: Pipeline, mode: str) -> list[Stage]:
    """Plan the promotion on each target; no promotion if `promote` is `manual`."""
    if mode == "manual":
        return []
    return [
        make_stage(
            StageKind.PROMOTE,
            f"promote@{name}",
            None,
            {
                "endpoints": [entry.endpoint for entry in pipeline.deploy if entry.target == name],
                "mode": mode,
            },
            needs=["register"],
            target=name,
        )
        for name in pipeline.benchmark.targets
    ]


def get_objective(pipeline: Pipeline, target: Target) -> TargetObjective:
    """Return the objective of a target, with its price if the objective is cost."""
    objective = pipeline.objective.on(target.name)
    return TargetObjective(
        objective=objective, price=target.price_per_hour if objective == "cost" else None
    )
