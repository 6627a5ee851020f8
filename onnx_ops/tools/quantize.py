"""Quantize one ONNX file, by a recipe or by search.

Functions raise UserError for an invalid file, an unusable output path, or a recipe that does not
fit. A search also raises UserError if no model fills the role within the budget. Functions raise
StageError if a library fails.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.arithmetic import Arithmetic, detect_arithmetic
from onnx_ops.domain.artifact import MODEL_FILE, Digest, digest_file, digest_json
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import SEARCH_FILE, Budget
from onnx_ops.domain.target import SIMPLIFIED, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.execution import ExecutionReport, inspect_execution, require_versions
from onnx_ops.measure.quantization import ROWS_AT_ONCE
from onnx_ops.measure.row_layout import arrange_context, arrange_runtime, read_layout
from onnx_ops.measure.timing import compute_log_ratios
from onnx_ops.measure.variants.answer_distance import describe_far_answers
from onnx_ops.measure.variants.search import (
    Reporter,
    SearchResult,
    describe_recipe,
    describe_trial,
    search,
)
from onnx_ops.measure.variants.trials import SearchContext
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.files import copy_model, iterate_tensors, parse_model, refuse_ort
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import (
    Context,
    Dataset,
    OptimizeRequest,
    PairedBenchmarkSchedule,
    Runtime,
    Tensors,
)
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.latency import ALPHA, LOOKS, session_interval
from onnx_ops.tools.generated_rows import generate_samples, settle_samples
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.sample_rows import SampleRows

_TIME_WITH_JUDGE = (
    "Time both files with `onnx-ops judge A B --only latency`, which has options for the inputs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupEstimate:
    """The ratio of a variant's time to that of its source, or why it is unknown.

    `low` and `high` are the ends of its 95 % interval.
    """

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    why: str = ""

    def __str__(self) -> str:
        """Return the estimate as a text."""
        if self.why:
            return f"not timed: {self.why}"
        return (
            f"{self.ratio:.2f} times the time ({self.low:.2f} to {self.high:.2f}); "
            "`onnx-ops judge` gives the verdict"
        )


def estimate_speedup(
    runtime: Runtime,
    target: Target,
    source: Path,
    variant: Path,
    supplied: SampleRows | None = None,
) -> SpeedupEstimate:
    """Estimate a variant's time ratio from a few session pairs on one row.

    The row is the first of the user's rows, or generated. If the times cannot be measured, the
    result has the reason.
    """
    try:
        rows = supplied or _generate_row(runtime, target, source, variant)
        runtime = arrange_runtime(runtime, rows.read_layout(source))
        samples = runtime.benchmark(
            (source, variant), target, rows.feed(1), PairedBenchmarkSchedule(rounds=LOOKS[0])
        )
    except (MeasurementError, UserError) as error:
        return SpeedupEstimate(why=str(error))
    estimate, low, high = session_interval(compute_log_ratios(samples), ALPHA / 2)
    return SpeedupEstimate(
        ratio=math.exp(estimate), low=math.exp(low), high=math.exp(min(high, 700))
    )


def _generate_row(runtime: Runtime, target: Target, source: Path, variant: Path) -> SampleRows:
    """Return one generated row that the source accepts.

    Raises:
        UserError: the two files have different inputs, or their inputs cannot be generated.
        MeasurementError: the source accepts no generated row.
    """
    try:
        inputs, bounds = shared_inputs(source, variant), read_input_bounds(source)
        samples = generate_samples(inputs, count=1, dims={}, bounds=bounds)
        return settle_samples(runtime, target, source, samples)
    except (MeasurementError, UserError) as error:
        error.remedy = _TIME_WITH_JUDGE  # `quantize` lacks options that other remedies name.
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFile:
    """How a variant was made, and how each target executes it.

    `sizes` are the bytes of the source and the variant. `effects` are speed estimates of float
    variants, whose only purpose is speed.
    """

    recipe: tuple[str, ...]
    sizes: tuple[int, int]
    examined: Mapping[str, ExecutionReport]
    effects: Mapping[str, SpeedupEstimate] = field(default_factory=dict)


def quantize_file(
    context: Context,
    section: Quantize,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    calibration: SampleRows | None = None,
) -> QuantizedFile:
    """Quantize a file, and write the variant to `path`.

    The model file appears completely or not at all, after its weights file. The recipe may depend
    on the targets.
    """
    check_paths(source, path)
    for target in targets:
        require_versions(source, target)
    machines = list_machines(context, targets)
    with Scratch() as folder:
        temporary = folder / MODEL_FILE
        optimizer = context.optimizer(section.method, section.env)
        section = optimizer.inline_files(section, context.root)
        quantized = optimizer.quantizes(section)
        recipe = optimizer.optimize(
            OptimizeRequest(
                section=section,
                source=source,
                path=temporary,
                calibration=calibration.rows if calibration else None,
                machines=machines,
                values=calibration.fixed if calibration else {},
            )
        )
        far = _describe_far_answers(context, source, temporary, calibration)
        effects = {
            t.name: estimate_speedup(
                context.runtime(t.runtime), t, source, temporary, supplied=calibration
            )
            for t in targets
            if not quantized
        }
        recipe = (*recipe, *filter(None, [far]))
        result = deliver(
            context,
            temporary,
            source,
            path,
            targets=targets,
            recipe=recipe,
            excluded=section.exclude,
        )
        return replace(result, effects=effects)


def _describe_far_answers(
    context: Context, source: Path, variant: Path, given: SampleRows | None
) -> str:
    """Return how far the variant's answers are from the source's.

    The rows are the user's, or generated. The text is empty if the answers are close, or cannot be
    compared.
    """
    runtime = context.runtime(SIMPLIFIED.runtime)
    try:
        inputs, bounds = shared_inputs(source, variant), read_input_bounds(source)
        rows = given or generate_samples(inputs, count=ROWS_AT_ONCE, dims={}, bounds=bounds)
        return describe_far_answers(
            arrange_runtime(runtime, rows.read_layout(source)), source, variant, rows.rows
        )
    except (MeasurementError, UserError):
        return ""  # `judge` and the benchmark of a pipeline report models that cannot run.


def check_paths(source: Path, path: Path) -> None:
    """Raise UserError if the source or the output path cannot be used.

    The source must be a valid model, and not in ORT format. The output file and its weights file
    must not exist, but their folder must.
    """
    check_model(source)
    refuse_ort(source)
    for place in (path, _weights_path(path)):
        if place.exists():
            raise UserError(
                "the file exists already",
                where=str(place),
                remedy="Remove the file, or name another.",
            )
    if not path.parent.is_dir():
        raise UserError("the folder does not exist", where=str(path.parent))


def list_machines(context: Context, targets: Sequence[Target]) -> tuple[Arithmetic, ...]:
    """Return the distinct kinds of machine of the targets."""
    return tuple(
        dict.fromkeys(
            detect_arithmetic(context.runtime(t.runtime).fingerprint(t), t) for t in targets
        )
    )


def deliver(
    context: Context,
    made: Path,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    recipe: tuple[str, ...],
    excluded: tuple[str, ...],
) -> QuantizedFile:
    """Inspect a variant on the targets, and copy it with its weights to `path`.

    `made` is the file of the variant. Its name of the weights file is changed to that beside
    `path`. `excluded` names nodes that should stay in float.
    """
    examined = {
        t.name: inspect_execution(context.runtime(t.runtime), source, made, t, excluded)
        for t in targets
    }
    sizes = read_model_info(source).size_bytes, read_model_info(made).size_bytes
    _copy_with_weights(made, path)
    return QuantizedFile(recipe=recipe, sizes=sizes, examined=examined)


def _copy_with_weights(made: Path, path: Path) -> None:
    """Copy a model to `path`, and its weights to the weights file beside `path`.

    The name of the weights in `made` is changed, so that no other file beside `path` is replaced.
    """
    if _weights_path(made).exists():
        model = parse_model(made)
        entries = (entry for tensor in iterate_tensors(model) for entry in tensor.external_data)
        for location in (entry for entry in entries if entry.key == "location"):
            location.value = _weights_path(path).name
        _copy_atomically(_weights_path(made), _weights_path(path))
        made.write_bytes(model.SerializeToString(deterministic=True))
    _copy_atomically(made, path)


def _weights_path(path: Path) -> Path:
    """Return the path of the weights file beside a model."""
    return path.with_name(f"{path.name}.data")


def _copy_atomically(made: Path, path: Path) -> None:
    """Copy a file; the copy appears completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.copyfile(made, partial)
    os.replace(partial, path)


def search_variant(
    context: Context,
    section: Quantize,
    source: Path,
    path: Path,
    *,
    targets: tuple[Target, ...],
    tuning_data: Dataset,
    metric: MetricDefinition,
    calibration: Tensors | None,
    data: Mapping[str, Digest],
    report: Reporter,
) -> QuantizedFile:
    """Search, write the variant of a role, and record all trials.

    The trials are recorded in `PATH.search.json`. The same search resumes after an interruption.
    `section.variants` contains the requested role. The metric is measured on the rows of
    `tuning_data`. `data` contains a digest of the rows for each use. If no model fills the role
    within the budget, the measured model with the smallest loss is written beside `path`, as
    `STEM.closest` and the suffix of `path`. Such a file of an earlier search is removed.

    Raises:
        UserError: the paths cannot be used (see `check_paths`), or no model fills the role.
        StageError: a library wrote a different file for the same recipe.
    """
    check_paths(source, path)
    closest_path = path.with_name(f"{path.stem}.closest{path.suffix}")
    if closest_path.exists() and closest_path.samefile(source):
        raise UserError(
            "the search would replace its source",
            where=str(closest_path),
            remedy="Name another output file.",
        )
    key = digest_json(
        {
            "section": codec.to_json(section),
            "model": digest_file(source),
            "data": dict(data),
            "metric": codec.to_json(metric),
            "targets": [target.digest() for target in targets],
            "hardware": [
                context.runtime(target.runtime).fingerprint(target).digest() for target in targets
            ],
        }
    )
    with Scratch() as folder:
        copy = folder / "source" / MODEL_FILE
        copy.parent.mkdir()
        copy_model(source, copy)
        search_context = SearchContext(
            project=arrange_context(
                context, read_layout(read_model_info(copy), tuning_data.values)
            ),
            section=section,
            source=copy,
            folder=folder / "trials",
            targets=targets,
            machines=list_machines(context, targets),
            tuning_data=tuning_data,
            calibration=calibration,
            metric=metric,
            lower=metric.higher_is_better is False,
            batch=1,
            budget=section.budget or Budget(),
            seed=int(key[-8:], 16),
        )
        result = search(search_context, context.journal(key), report)
        record_path = path.with_name(f"{path.name}.{SEARCH_FILE}")
        record_path.write_bytes(codec.dumps(result.record))
        kept = _replace_closest(result, closest_path)
        if not result.models:
            remedy = _suggest_options(result)
            raise UserError(
                "the search found no model for the role within the budget",
                where=path.name,
                why="; ".join(slot.reason for slot in result.record.slots),
                remedy=f"{remedy}; {record_path.name} contains all trials{kept}.",
            )
        ((made, trial),) = result.models.values()
        return deliver(
            context,
            made,
            copy,
            path,
            targets=targets,
            recipe=tuple(describe_recipe(result.record, trial)),
            excluded=trial.excluded,
        )


def _suggest_options(result: SearchResult) -> str:
    """Return the remedy for a search that found no model; it lacks a full stop."""
    record = result.record
    if record.timed_out:
        return "Allow more time with `--budget max_minutes=…`"
    if not record.trials:
        return "Use another target (`--target NAME`), or keep the float model"
    if result.closest is None:  # No trial could be measured.
        return "Remove this cause, or keep the float model"
    if record.pareto_front and any(slot.role == "fast" for slot in record.slots):
        return "Use `--select small` or `--select exact`, or keep the float model"
    return "Raise a limit with `--budget NAME=…`, or keep the float model"


def _replace_closest(result: SearchResult, path: Path) -> str:
    """Replace the closest model of an earlier search; return a text that names it.

    If this search has no closest model, the file is only removed, and the text is empty.
    """
    for earlier in (path, _weights_path(path)):
        earlier.unlink(missing_ok=True)
    if result.closest is None:
        return ""
    made, trial = result.closest
    _copy_with_weights(made, path)
    description = describe_trial(trial, result.record.metric)
    return f", and {path.name} has the smallest loss: {description}"
