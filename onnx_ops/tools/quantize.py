"""Quantize one ONNX file for its targets, by a recipe or by search, without a pipeline."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, digest_file, digest_json
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import SEARCH_FILE, Arithmetic, Budget, detect_arithmetic
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.execution import ExecutionReport, inspect_execution
from onnx_ops.measure.search import SearchContext, Tell, describe_recipe, search
from onnx_ops.measure.timing import compute_log_ratios
from onnx_ops.onnx_graph.compatibility import check_model, explain_version_limits
from onnx_ops.onnx_graph.files import copy_model, iterate_tensors, parse_model, refuse_ort
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import (
    ConfiguredOptimizer,
    Dataset,
    OptimizeRequest,
    PairedBenchmarkSchedule,
    Ports,
    Runtime,
    Tensors,
)
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.latency import ALPHA, LOOKS, session_interval
from onnx_ops.tools.probing import generate_samples, shared_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupEstimate:
    """Time of the variant over that of its source, with 95 % bounds; `why` instead where that cannot be known."""

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    why: str = ""

    def words(self) -> str:
        if self.why:
            return f"not timed: {self.why}"
        return f"{self.ratio:.2f} times the time ({self.low:.2f} to {self.high:.2f}); `judge` decides"


def estimate_speedup(runtime: Runtime, target: Target, source: Path, variant: Path) -> SpeedupEstimate:
    """A few fresh session pairs on one made-up row."""
    try:
        feed = generate_samples(shared_inputs(source, variant), count=1, dims={}).feed(1)
        samples = runtime.race((source, variant), target, feed, PairedBenchmarkSchedule(heats=LOOKS[0]))
    except (MeasurementError, UserError) as error:
        return SpeedupEstimate(why=str(error))
    estimate, low, high = session_interval(compute_log_ratios(samples), ALPHA / 2)
    return SpeedupEstimate(ratio=math.exp(estimate), low=math.exp(low), high=math.exp(min(high, 700)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFile:
    """What was made and how: sizes in bytes before and after, and what each target makes of it.

    `effects` on time are told for float variants, which are made for nothing else.
    """

    recipe: tuple[str, ...]
    sizes: tuple[int, int]
    examined: Mapping[str, ExecutionReport]
    effects: Mapping[str, SpeedupEstimate] = field(default_factory=dict)


def quantize_file(
    ports: Ports,
    section: Quantize,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    calibration: Tensors | None = None,
) -> QuantizedFile:
    """Write the variant to `path`, which must not exist; it appears whole or not at all.

    Args:
        ports: optimizers and runtimes.
        section: the recipe as a pipeline file would give it.
        source: the float model.
        path: the variant.
        targets: those that the recipe follows.
        calibration: rows by ONNX name, or None.

    Raises:
        UserError: a file is not valid or exists already, or the recipe does not fit.
        StageError: the library failed.
    """
    check_paths(source, path)
    for target in targets:
        if reason := explain_version_limits(read_model_info(source), target):
            remedy = "Export the model for this target's opset and IR version."
            raise UserError(reason.partition(": set export.")[0], where=source.name, remedy=remedy)
    machines = list_machines(ports, targets)
    with Scratch() as folder:
        made = folder / MODEL_FILE
        optimizer = ports.optimizer(section.method, section.env)
        quantized = optimizer.quantized
        if isinstance(optimizer, ConfiguredOptimizer):
            section = optimizer.settle(section, ports.root)
            quantized = optimizer.quantizes(section)
        recipe = optimizer.optimize(
            OptimizeRequest(section=section, source=source, path=made, calibration=calibration, machines=machines)
        )
        effects = {
            t.name: estimate_speedup(ports.runtime(t.runtime), t, source, made) for t in targets if not quantized
        }
        found = deliver(ports, made, source, path, targets=targets, recipe=recipe, excluded=section.exclude)
        return replace(found, effects=effects)


def check_paths(source: Path, path: Path) -> None:
    """Raises UserError if the source is no valid model, or the variant cannot be written to its path."""
    check_model(source)
    refuse_ort(source)
    for place in (path, _weights_of(path)):
        if place.exists():
            raise UserError("there is a file of that name", where=str(place), remedy="Remove it, or name another.")
    if not path.parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent))


def list_machines(ports: Ports, targets: Sequence[Target]) -> tuple[Arithmetic, ...]:
    """The kinds of machine of the targets, each once."""
    return tuple(dict.fromkeys(detect_arithmetic(ports.runtime(t.runtime).fingerprint(t), t) for t in targets))


def deliver(
    ports: Ports,
    made: Path,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    recipe: tuple[str, ...],
    excluded: tuple[str, ...],
) -> QuantizedFile:
    """Put a variant that was made to its path, weights too large for one file beside it, and examine it."""
    examined = {t.name: inspect_execution(ports.runtime(t.runtime), source, made, t, excluded) for t in targets}
    sizes = read_model_info(source).size_bytes, read_model_info(made).size_bytes
    if _weights_of(made).exists():
        model = parse_model(made)
        for entry in (
            entry for tensor in iterate_tensors(model) for entry in tensor.external_data if entry.key == "location"
        ):
            entry.value = _weights_of(path).name
        _place(_weights_of(made), _weights_of(path))
        made.write_bytes(model.SerializeToString(deterministic=True))
    _place(made, path)
    return QuantizedFile(recipe=recipe, sizes=sizes, examined=examined)


def _weights_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _place(made: Path, path: Path) -> None:
    """Copy a file; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.copyfile(made, partial)
    os.replace(partial, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSearch:
    """What is to be found. `section.keep` is the one role that is wanted; `data` are digests of the rows, by use."""

    section: Quantize
    source: Path
    path: Path
    targets: tuple[Target, ...]
    tune: Dataset
    metric: MetricDefinition
    calibration: Tensors | None = None
    data: Mapping[str, Digest] = field(default_factory=dict)


def search_variant(ports: Ports, order: VariantSearch, *, tell: Tell) -> QuantizedFile:
    """Search, and write the variant of the wanted role to its path; the same order goes on where it was stopped.

    Everything that was tried is written beside it, `PATH.search.json`, whatever comes of it.

    Raises:
        UserError: a file is not valid or exists already, or nothing keeps the budget.
        StageError: a library failed.
    """
    check_paths(order.source, order.path)
    key = _search_key(ports, order)
    with Scratch() as folder:
        source = folder / "source" / MODEL_FILE
        source.parent.mkdir()
        copy_model(order.source, source)
        ground = SearchContext(
            ports=ports,
            section=order.section,
            source=source,
            folder=folder / "trials",
            targets=order.targets,
            machines=list_machines(ports, order.targets),
            tune=order.tune,
            calibration=order.calibration,
            metric=order.metric,
            lower=order.metric.higher_is_better is False,
            batch=1,
            budget=order.section.budget or Budget(),
            seed=int(key[-8:], 16),
        )
        found = search(ground, ports.journal(key), tell)
        tried = order.path.with_name(f"{order.path.name}.{SEARCH_FILE}")
        tried.write_bytes(codec.dumps(found.record))
        if not found.models:
            raise UserError(
                "nothing keeps the budget",
                where=order.path.name,
                why="; ".join(slot.reason for slot in found.record.slots),
                remedy=(
                    f"Allow more time with `--budget max_minutes=…`; {tried.name} holds what was tried."
                    if found.record.timed_out
                    else "Allow more with `--budget metric_drop=…`, or keep the float model; "
                    f"{tried.name} holds what was tried."
                ),
            )
        ((made, trial),) = found.models.values()
        return deliver(
            ports,
            made,
            source,
            order.path,
            targets=order.targets,
            recipe=tuple(describe_recipe(found.record, trial)),
            excluded=trial.excluded,
        )


def _search_key(ports: Ports, order: VariantSearch) -> Digest:
    return digest_json(
        {
            "section": codec.to_json(order.section),
            "model": digest_file(order.source),
            "data": dict(order.data),
            "metric": codec.to_json(order.metric),
            "targets": [target.digest() for target in order.targets],
            "hardware": [ports.runtime(target.runtime).fingerprint(target).digest() for target in order.targets],
        }
    )
