"""Benchmark: measure one variant on one target, as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import CUSTOM_OPS, MODEL_FILE, Digest, Manifest
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    ChampionFacts,
    Divergence,
    Evidence,
    ParityMeasurement,
    SampledRows,
    SourceLimits,
    TreeStructure,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ACCURACY, MeasurementRequest, MetricDefinition
from onnx_ops.domain.pipeline import EXPORT, Stage
from onnx_ops.domain.release import Lineage
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.execution import ExecutionReport, inspect_execution, require_hardware
from onnx_ops.measure.files import MODEL, PACKAGE, checkout_files, get_dataset, pack_arrays, put_document, put_folder
from onnx_ops.measure.paired_rows import digest_rows
from onnx_ops.measure.parity import find_hardware_divergence, measure_invariance, measure_parity
from onnx_ops.measure.predictions import flatten_column
from onnx_ops.measure.reference_outputs import get_reference
from onnx_ops.measure.scoring import ScoringRequest, TaskMetrics, measure_metrics
from onnx_ops.measure.speed import ComparisonSpec, measure_speed
from onnx_ops.measure.timing import build_feed
from onnx_ops.measure.user_functions import importable, load_function
from onnx_ops.onnx_graph.compatibility import explain_incompatibility
from onnx_ops.onnx_graph.files import read_structure
from onnx_ops.onnx_graph.model_info import count_operators, read_model_info
from onnx_ops.pipeline.stages.champion import Champion, read_champion
from onnx_ops.ports import Dataset, Ports, Runtime
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.rules.metric import explain_unscored
from onnx_ops.statistics.scores import CANDIDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkContext:
    """The files and the runtime of one benchmark; the last baseline decides."""

    runtime: Runtime
    target: Target
    candidate: Path
    export: Path
    baselines: Mapping[str, Path]
    dataset: Dataset
    seed: int


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Measure the variant and store its evidence."""
    settings: Mapping[str, Any] = stage.settings
    target = codec.from_json(stage.hints["target"], Target, where=stage.id)
    store = ports.store
    variant = inputs[settings["source"]]
    whole = get_dataset(store, inputs[f"data/{settings['data']}"], inputs["export"])
    data = whole.head(settings["limit"])
    sampled = SampledRows(data=settings["data"], used=len(data), total=len(whole))
    runtime = ports.runtime(target.runtime)
    hardware = require_hardware(runtime, target)
    with Scratch() as folder:
        champion, manifest, is_export = read_champion(stage, ports), variant.subset(MODEL), stage.variant == EXPORT
        candidate = checkout_files(store, variant, MODEL, folder / "candidate") / MODEL_FILE
        export = checkout_files(store, inputs["export"], MODEL, folder / "export") / MODEL_FILE
        baselines = {} if is_export else {EXPORT: export}
        if champion and champion.manifest != manifest.digest():
            baselines["champion"] = Path(champion.location) / MODEL_FILE
        context = BenchmarkContext(
            runtime=runtime,
            target=target,
            candidate=candidate,
            export=export,
            baselines=baselines,
            dataset=data,
            seed=int(key[-8:], 16),
        )
        _check_compatibility(candidate, target, stage.id)
        metrics = _measure_metrics(context, is_export, stage, ports)
        spec = ComparisonSpec(
            runtime=runtime,
            target=target,
            candidate=candidate,
            baselines=baselines,
            feed=build_feed(candidate, data.inputs, settings["batch"]),
            seed=context.seed,
        )
        hints: Mapping[str, Any] = stage.hints
        request = MeasurementRequest(
            throughput=tuple(settings.get("throughput", ())),
            starts=bool(settings.get("starts", False)),
            tolerances=hints.get("tolerances", {}),
        )
        speed = measure_speed(spec, request)
        quantized = bool(settings["quantized"])
        execution = ExecutionReport()
        if not is_export:
            excluded = _read_documents(ports, variant["excluded.json"], str)
            execution = inspect_execution(runtime, export, candidate, target, excluded)
        reference = get_reference(store, inputs["export"]["reference.npz"])
        parity = () if quantized else measure_parity(runtime, candidate, target, reference)
        package = _make_package(context, folder / "package", ports)
        divergence = next(iter(_read_documents(ports, inputs["validate"]["divergence.json"], Divergence)), None)
        evidence = Evidence(
            pipeline=settings["pipeline"],
            variant=stage.variant or "",
            target=target.name,
            quantized=quantized,
            release=codec.loads(store.read(inputs["export"]["lineage.json"]), Lineage).release,
            manifest=manifest.digest(),
            target_digest=target.digest(),
            dedicated=target.dedicated,
            size_bytes=_count_bytes(package or manifest.files, ports),
            hardware=hardware,
            conditions=dict(ports.conditions()),
            runtime=runtime.facts(candidate, target),
            baseline=next(reversed(baselines), ""),
            champion=None if champion is None else _read_champion_facts(champion),
            parity=parity,
            export_parity=_read_documents(ports, inputs["validate"]["parity.json"], ParityMeasurement),
            batch_invariance=measure_invariance(runtime, candidate, target, data.inputs, reference),
            divergence=divergence or find_hardware_divergence(ports, runtime, target, candidate, reference, parity),
            weights=_read_documents(ports, variant["weights.json"], WeightMeasurement) if quantized else (),
            source=codec.loads(store.read(inputs["export"]["source.json"]), SourceLimits),
            trees=next(iter(_read_documents(ports, inputs["validate"]["trees.json"], TreeStructure)), None),
            activations=_read_documents(ports, variant["activations.json"], ActivationMeasurement) if quantized else (),
            coverage=execution.coverage,
            advice=execution.advice,
            recipe=() if is_export else _read_documents(ports, variant["recipe.json"], str),
            metrics=metrics.counts,
            scores=metrics.scores,
            grouped=metrics.grouped,
            sampled=sampled if sampled.used < sampled.total else None,
            opsets=read_model_info(candidate).opsets,
            operators=count_operators(read_structure(candidate)),
            comparisons=speed.comparisons,
            latency=speed.latency,
            throughput=speed.throughput,
            starts=speed.starts,
            ratios=speed.ratios,
            raw=store.put_bytes(pack_arrays({**speed.raw, **metrics.rows, **digest_rows(data)})),
        )
    files = {"evidence.json": put_document(store, evidence), "raw.npz": evidence.raw or Digest("")}
    return Manifest(files={**package, **files})


def _make_package(context: BenchmarkContext, folder: Path, ports: Ports) -> dict[str, Digest]:
    """Return the files of a target with its own model format."""
    if context.target.ort_format is None:
        return {}
    folder.mkdir()
    context.runtime.package(context.candidate, context.target, folder)
    return put_folder(ports.store, folder, PACKAGE)


def _read_champion_facts(champion: Champion) -> ChampionFacts:
    folder = Path(champion.location)
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] != CUSTOM_OPS]
    size = sum(path.stat().st_size for path in files)
    return ChampionFacts(version=champion.version, manifest=champion.manifest, size_bytes=size)


def _count_bytes(files: Mapping[str, Digest], ports: Ports) -> int:
    """Return the bytes of the model, without operator libraries and descriptions of a package."""
    packaged = {name: digest for name, digest in files.items() if name.endswith(".ort")}
    own = packaged or {name: digest for name, digest in files.items() if not name.startswith(f"{CUSTOM_OPS}/")}
    return sum(ports.store.path(digest).stat().st_size for digest in own.values())


def _check_compatibility(model: Path, target: Target, where: str) -> None:
    """Check the file's versions first: a runtime's own message is unclear or missing."""
    if reason := explain_incompatibility(model, target):
        raise UserError(
            reason,
            where=where,
            remedy=f"Export what all targets accept, give the target its custom_ops, or leave {target.name} out.",
        )


def _read_documents(ports: Ports, digest: Digest, kind: Any) -> Any:
    return codec.loads(ports.store.read(digest), tuple[kind, ...])


def _measure_metrics(context: BenchmarkContext, is_export: bool, stage: Stage, ports: Ports) -> TaskMetrics:
    """Measure the task metrics of the variant, alone and on the same rows as its baselines."""
    settings: Mapping[str, Any] = stage.settings
    judged: Mapping[str, Any] = stage.hints
    definitions = tuple(codec.from_json(entry["definition"], MetricDefinition) for entry in settings["metrics"])
    definitions, default = add_default_metric(definitions, context.dataset)
    with importable(ports.root):
        functions = {d.use: load_function(d.use, "gates") for d in definitions if d.use}
        scorer = ScoringRequest(
            runtime=context.runtime,
            target=context.target,
            models={CANDIDATE: context.candidate, **context.baselines},
            dataset=context.dataset,
            seed=context.seed,
            functions=functions,
        )
        metrics = measure_metrics(scorer, definitions)
        failed = explain_unscored(judged.get("judged", ()), metrics.scores)
        if failed and not is_export:  # if only the variant answers differently, the file is right
            again = [one for one in definitions if one.label in failed]
            failed = explain_unscored(
                failed, measure_metrics(replace(scorer, models={CANDIDATE: context.export}), again).scores
            )
    if failed:
        raise UserError(next(iter(failed.values())), where="gates")
    if default is not None and any(counts.metric == ACCURACY.label for counts in metrics.counts):
        return replace(metrics, scores=tuple(one for one in metrics.scores if one.metric != default.label))
    return metrics


def add_default_metric(
    definitions: tuple[MetricDefinition, ...], dataset: Dataset
) -> tuple[tuple[MetricDefinition, ...], MetricDefinition | None]:
    """Add rmse where labels are numbers and no gate measures an error of numbers.

    Whether a model returns classes or numbers is known once it has answered: then either accuracy or rmse is reported.
    """
    numbers = (
        dataset.label is not None and dataset.label.dtype.kind in "fiu" and flatten_column(dataset.label).ndim == 1
    )
    if not numbers or any(definition.name in ("mae", "rmse", "r2") for definition in definitions):
        return definitions, None
    default = MetricDefinition(name="rmse")
    return (*definitions, default), default
