"""Benchmark: measure one variant on one target, as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import CUSTOM_OPS, MODEL_FILE, Digest, Manifest, digest_json
from onnx_ops.domain.evidence import (
    EXPORT,
    ActivationMeasurement,
    ChampionFacts,
    Divergence,
    Evidence,
    ParityMeasurement,
    SampledRows,
    SourceLimits,
    SystemResult,
    TreeStructure,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ACCURACY, MeasurementRequest, MetricDefinition
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.release import Lineage
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import UserError
from onnx_ops.measure.execution import ExecutionReport, inspect_execution, require_hardware
from onnx_ops.measure.files import (
    MODEL,
    PACKAGE,
    checkout_files,
    get_dataset,
    pack_arrays,
    put_document,
    put_folder,
)
from onnx_ops.measure.paired_rows import digest_rows
from onnx_ops.measure.parity import (
    REFERENCE_TARGET,
    find_hardware_divergence,
    measure_invariance,
    measure_parity,
)
from onnx_ops.measure.reference_outputs import get_reference
from onnx_ops.measure.row_layout import arrange_context, get_layout
from onnx_ops.measure.scoring import (
    ModelPredictions,
    ScoringRequest,
    TaskMetrics,
    add_default_metric,
    measure_metrics,
)
from onnx_ops.measure.slices import SlicePlan, get_slicings
from onnx_ops.measure.speed import measure_scheduling, measure_speed
from onnx_ops.measure.timing import build_feed
from onnx_ops.measure.user_functions import importable, load_functions
from onnx_ops.onnx_graph.files import share_structure
from onnx_ops.onnx_graph.model_info import count_operators, read_model_info
from onnx_ops.pipeline.stage_settings import SYSTEM, tags_id
from onnx_ops.pipeline.stages.champion import Champion, read_champion
from onnx_ops.pipeline.stages.score import check_compatibility, read_shards
from onnx_ops.pipeline.stages.system import RESULTS
from onnx_ops.ports import Context, Runtime
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.rules.metric import explain_unscored
from onnx_ops.statistics.scores import CANDIDATE


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Measure the variant and store its evidence."""
    settings: Mapping[str, Any] = stage.settings
    target = codec.from_json(stage.hints["target"], Target, where=stage.id)
    store = context.store
    variant = inputs[settings["source"]]
    rows = inputs[f"data/{settings['data']}"]
    whole = get_dataset(store, rows, inputs["export"])
    data = whole.head(settings["limit"])
    sampled = SampledRows(data=settings["data"], used=len(data), total=len(whole))
    context = arrange_context(context, get_layout(store, inputs["export"], data.values))
    runtime = context.runtime(target.runtime)
    hardware = require_hardware(runtime, target)
    with Scratch() as folder:
        champion, manifest, is_export = (
            read_champion(stage, context),
            variant.subset(MODEL),
            stage.variant == EXPORT,
        )
        candidate = checkout_files(store, variant, MODEL, folder / "candidate") / MODEL_FILE
        export = checkout_files(store, inputs["export"], MODEL, folder / "export") / MODEL_FILE
        baselines = _choose_baselines(None if is_export else export, champion, manifest)
        check_compatibility(candidate, target, stage.id)
        # The seed depends only on the model, the rows and the target, so that the intervals are the
        # same with and without shards.
        seed = int(digest_json([manifest.digest(), rows.digest(), stage.target])[-8:], 16)
        known, scored_on = _read_known(stage, inputs, context)
        scorer = ScoringRequest(
            runtime=runtime,
            target=target,
            models={CANDIDATE: candidate, **baselines},
            dataset=data,
            seed=seed,
            known=known,
            slices=_read_slices(settings, inputs, context, len(data)),
        )
        metrics = _measure_metrics(scorer, None if is_export else export, stage, context)
        hints: Mapping[str, Any] = stage.hints
        request = MeasurementRequest(
            throughput=tuple(settings.get("throughput", ())),
            starts=bool(settings.get("starts", False)),
            tolerances=hints.get("tolerances", {}),
        )
        feed = build_feed(candidate, data.inputs, settings["batch"])
        speed = measure_speed(
            runtime, target, candidate, baselines, feed, request, seed=int(key[-8:], 16)
        )
        quantized = bool(settings["quantized"])
        execution = ExecutionReport()
        if not is_export:
            excluded = _read_documents(context, variant["excluded.json"], str)
            execution = inspect_execution(runtime, export, candidate, target, excluded)
        reference = get_reference(store, inputs["export"]["reference.npz"])
        exact = context.runtime(REFERENCE_TARGET.runtime)
        parity = () if quantized else measure_parity(runtime, candidate, target, reference, exact)
        package = _make_package(runtime, candidate, target, folder / "package", context)

        divergence = next(
            iter(_read_documents(context, inputs["validate"]["divergence.json"], Divergence)), None
        )
        evidence = Evidence(
            pipeline=settings["pipeline"],
            variant=stage.variant or "",
            target=target.name,
            quantized=quantized,
            release=codec.loads(store.read(inputs["export"]["lineage.json"]), Lineage).release,
            manifest=manifest.digest(),
            target_digest=target.digest(),
            dedicated=target.dedicated,
            size_bytes=_count_bytes(package or manifest.files, context),
            hardware=hardware,
            conditions=dict(context.conditions()),
            runtime=runtime.facts(candidate, target),
            baseline=next(reversed(baselines), ""),
            champion=None if champion is None else _read_champion_facts(champion),
            parity=parity,
            export_parity=_read_documents(
                context, inputs["validate"]["parity.json"], ParityMeasurement
            ),
            batch_invariance=measure_invariance(runtime, candidate, target, data.inputs, reference),
            divergence=divergence
            or find_hardware_divergence(context, runtime, target, candidate, reference, parity),
            weights=_read_documents(context, variant["weights.json"], WeightMeasurement)
            if quantized
            else (),
            source=codec.loads(store.read(inputs["export"]["source.json"]), SourceLimits),
            trees=next(
                iter(_read_documents(context, inputs["validate"]["trees.json"], TreeStructure)),
                None,
            ),
            unused_inputs=_read_documents(context, inputs["validate"]["unused.json"], str),
            system=_read_system(context, inputs),
            activations=_read_documents(context, variant["activations.json"], ActivationMeasurement)
            if quantized
            else (),
            coverage=execution.coverage,
            advice=execution.advice,
            recipe=() if is_export else _read_documents(context, variant["recipe.json"], str),
            metrics=metrics.counts,
            scores=metrics.scores,
            grouped=metrics.grouped,
            scored_on=scored_on,
            slices=metrics.slices,
            sampled=sampled if sampled.used < sampled.total else None,
            opsets=read_model_info(candidate).opsets,
            operators=count_operators(share_structure(candidate)),
            comparisons=speed.comparisons,
            latency=speed.latency,
            throughput=speed.throughput,
            scheduling=measure_scheduling(
                runtime,
                candidate,
                target,
                data.inputs,
                speed.latency,
                hardware.cores,
                int(key[-8:], 16),
            ),
            starts=speed.starts,
            ratios=speed.ratios,
            raw=store.put_bytes(pack_arrays({**speed.raw, **metrics.rows, **digest_rows(data)})),
        )
    files = {"evidence.json": put_document(store, evidence), "raw.npz": evidence.raw or Digest("")}
    return Manifest(files={**package, **files})


def _make_package(
    runtime: Runtime, model: Path, target: Target, folder: Path, context: Context
) -> dict[str, Digest]:
    """Return the files of the package for a target whose model format is not ONNX."""
    if target.ort_format is None:
        return {}
    folder.mkdir()
    runtime.package(model, target, folder)
    return put_folder(context.store, folder, PACKAGE)


def _choose_baselines(
    export: Path | None, champion: Champion | None, manifest: Manifest
) -> dict[str, Path]:
    """Return the models with which the variant is compared, by name.

    The last baseline is the primary one. It is the champion, if there is one whose files differ
    from those of the variant.
    """
    baselines = {} if export is None else {EXPORT: export}
    if champion and champion.manifest != manifest.digest():
        baselines["champion"] = Path(champion.location) / MODEL_FILE
    return baselines


def _read_champion_facts(champion: Champion) -> ChampionFacts:
    folder = Path(champion.location)
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != CUSTOM_OPS
    ]
    size = sum(path.stat().st_size for path in files)
    return ChampionFacts(version=champion.version, manifest=champion.manifest, size_bytes=size)


def _count_bytes(files: Mapping[str, Digest], context: Context) -> int:
    """Return the size of the model in bytes.

    The size does not include operator libraries and the descriptions of a package.
    """
    packaged = {name: digest for name, digest in files.items() if name.endswith(".ort")}
    own = packaged or {
        name: digest for name, digest in files.items() if not name.startswith(f"{CUSTOM_OPS}/")
    }
    return sum(context.store.path(digest).stat().st_size for digest in own.values())


def _read_documents(context: Context, digest: Digest, kind: Any) -> Any:
    return codec.loads(context.store.read(digest), tuple[kind, ...])


def _read_system(context: Context, inputs: Mapping[str, Manifest]) -> tuple[SystemResult, ...]:
    """Return the comparison with the project's own code; empty without one."""
    results: tuple[SystemResult, ...] = (
        _read_documents(context, inputs[SYSTEM][RESULTS], SystemResult) if SYSTEM in inputs else ()
    )
    return results


def _read_known(
    stage: Stage, inputs: Mapping[str, Manifest], context: Context
) -> tuple[Mapping[str, ModelPredictions], tuple[HardwareFingerprint, ...]]:
    """Return the predictions of score stages by model, and the machines that scored.

    Both results are empty without score stages.
    """
    settings: Mapping[str, Any] = stage.settings
    known, machines = dict[str, ModelPredictions](), set[HardwareFingerprint]()
    if shards := settings.get("shards"):
        for name, variant in {EXPORT: EXPORT, CANDIDATE: str(stage.variant)}.items():
            known[name], there = read_shards(
                context.store, inputs, variant, str(stage.target), shards
            )
            machines |= there
    return known, tuple(sorted(machines, key=HardwareFingerprint.digest))


def _read_slices(
    settings: Mapping[str, Any], inputs: Mapping[str, Manifest], context: Context, rows: int
) -> SlicePlan:
    """Return the slices of the scored rows that gates judge.

    Raises:
        UserError: there are fewer values than rows.
    """
    if not settings.get("slices"):
        return SlicePlan()
    slicings = get_slicings(context.store, inputs[tags_id(settings["data"])], rows)
    for slicing in slicings:
        if len(slicing.numbers) != rows:
            what = f"the slices have {len(slicing.numbers)} values for {rows} scored rows"
            remedy = "Provide one value for each row of the scored data set."
            raise UserError(what, where="slices", remedy=remedy)
    return SlicePlan(slicings=slicings, metrics=settings["slices"])


def _measure_metrics(
    scorer: ScoringRequest, export: Path | None, stage: Stage, context: Context
) -> TaskMetrics:
    """Measure the task metrics of the variant, alone and in pairs with its baselines.

    All models are measured on the same rows. `export` is the file from which the variant was made;
    it is None if the variant is the export itself.

    Raises:
        UserError: a metric that a gate judges cannot be computed for the variant and the export, or
            the module of a metric's function raises an error.
        NotFoundError, MissingPackageError: a metric's function, or a package that it imports, is
            missing.
        MeasurementError: the variant or the export does not run.
    """
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    definitions = tuple(
        codec.from_json(entry["definition"], MetricDefinition) for entry in settings["metrics"]
    )
    definitions, default = add_default_metric(definitions, scorer.dataset)
    with importable(context.root):
        references = [name for definition in definitions for name in definition.functions]
        functions = load_functions(references, "gates")
        scorer = replace(scorer, functions=functions)
        metrics = measure_metrics(scorer, definitions)
        failed = explain_unscored(hints.get("judged", ()), metrics.scores)
        # If the export can be scored, the cause is the variant and not the pipeline file.
        if failed and export is not None:
            again = [one for one in definitions if one.label in failed]
            scores = measure_metrics(
                replace(scorer, models={CANDIDATE: export}, known={}, slices=SlicePlan()), again
            ).scores
            failed = explain_unscored(failed, scores)
    if failed:
        raise UserError(next(iter(failed.values())), where="gates")
    if default is not None and any(counts.metric == ACCURACY.label for counts in metrics.counts):
        return replace(
            metrics, scores=tuple(one for one in metrics.scores if one.metric != default.label)
        )
    return metrics
