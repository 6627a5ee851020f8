"""Verdicts on quantized models of many recipes, sound and faulty ones.

It is also shown how many of the faults the gate of the task metric detects.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import derive_seed
from benchmarks.truth.evidence import evidence
from benchmarks.truth.recipes import MODELS, Trained, make, variants
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import ParityMeasurement, WeightMeasurement
from onnx_ops.domain.gate import ACCURACY, MetricGate, ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.paired_rows import count_pairs
from onnx_ops.measure.predictions import read_classes, read_prediction
from onnx_ops.measure.quantization import measure_activations, measure_weights
from onnx_ops.statistics.rules.metric import judge_metric
from onnx_ops.statistics.rules.parity import judge_parity

TARGET = Target(name="truth")
SEEDS = 3
QUICK_MODELS = ("mlp", "cnn", "depthwise")
FAULTY = ("per channel", "per tensor", "dynamic")
"""Recipes into which faults are injected."""

_GOOD_EXPORT = ParityMeasurement(
    output="output", group="real", rows=1, error=0.0, noise=1.0, ratio=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    fault: str
    model: str
    recipe: str
    metric: Verdict
    invariants: GateResult


Change = Callable[[Any], Any]


def prove(*, quick: bool) -> list[Claim]:
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as name:
        folder = Path(name)
        for seed in map(derive_seed, range(1 if quick else SEEDS)):
            for kind in QUICK_MODELS if quick else MODELS:
                model = make(kind, folder, seed)
                right = _right(model, model.path)
                for recipe, variant in variants(model, folder):
                    trials.append(_trial("", model, recipe, variant, right))
                    if recipe in FAULTY:
                        trials += _faulty(model, recipe, variant, right)
    wrong = [t for t in trials if (t.invariants.verdict is Verdict.PASS) == bool(t.fault)]
    rows = [
        (
            t.fault or "none",
            t.model,
            t.recipe,
            t.metric.value,
            t.invariants.verdict.value,
            t.invariants.reason,
        )
        for t in wrong
    ]
    head = ("fault", "model", "recipe", "metric gate", "invariants", "reason")
    table(f"quantization: {len(wrong)} wrong of {len(trials)}", head, rows)
    return list(_claims(trials, quick))


def _claims(trials: list[Trial], quick: bool) -> Iterator[Claim]:
    good = [trial for trial in trials if not trial.fault]
    alarms = sum(trial.invariants.verdict is not Verdict.PASS for trial in good)
    yield at_most("quantization", "sound models refused", alarms, len(good), 0.02)
    faulty = [trial for trial in trials if trial.fault]
    caught = sum(trial.invariants.verdict is Verdict.FAIL for trial in faulty)
    unseen = sum(trial.metric is not Verdict.FAIL for trial in faulty)
    what = f"{len(FAULTS)} kinds of fault: caught (the metric gate does not fail {unseen})"
    yield at_least("quantization", what, caught, len(faulty), 0.97)
    rows = []
    for fault in FAULTS:
        tried = [trial for trial in faulty if trial.fault == fault]
        found = sum(trial.invariants.verdict is Verdict.FAIL for trial in tried)
        rows.append(
            (
                fault,
                f"{found} of {len(tried)}",
                str(sum(trial.metric is Verdict.FAIL for trial in tried)),
            )
        )
    table("quantization, by kind", ("fault", "caught", "by the metric gate"), rows)


def _right(model: Trained, path: Path) -> Any:
    answers = read_prediction(
        ACCURACY, OnnxRuntime().run(path, TARGET, ({model.feed: model.scored},))[0]
    )
    return read_classes(model.labels, answers, ACCURACY) == model.labels


def _faulty(model: Trained, recipe: str, variant: Path, right: Any) -> Iterator[Trial]:
    path = variant.with_name("faulty.onnx")
    for fault, places in FAULTS.items():
        for inject in places:
            found = onnx.load(variant)
            if inject(found):
                onnx.save(found, path)
                yield _trial(fault, model, recipe, path, right)


def _trial(fault: str, model: Trained, recipe: str, path: Path, right: Any) -> Trial:
    counts = count_pairs("accuracy", "fp32", right, _right(model, path))
    found = evidence(
        quantized=True,
        metrics=(counts,),
        export_parity=(_GOOD_EXPORT,),
        weights=_weights(model, path),
        activations=measure_activations(OnnxRuntime(), model.path, path, model.unseen),
    )
    (metric,) = judge_metric(MetricGate(max_drop=0.01), found)
    invariants = max(judge_parity(ParityGate(), found), key=lambda result: result.verdict.rank)
    return Trial(
        fault=fault, model=model.name, recipe=recipe, metric=metric.verdict, invariants=invariants
    )


def _weights(model: Trained, path: Path) -> tuple[WeightMeasurement, ...]:
    """Return the measurements of the weights.

    A variant that cannot be compared has none, which is inconclusive.
    """
    try:
        return measure_weights(model.path, path, OnnxRuntime(), model.unseen)
    except MeasurementError:
        return ()


def _change(model: onnx.ModelProto, name: str, change: Change) -> bool:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            before = numpy_helper.to_array(tensor)
            after = np.asarray(change(before.copy())).astype(before.dtype).reshape(before.shape)
            tensor.CopyFrom(numpy_helper.from_array(np.array(after, order="C"), name))
            return not np.array_equal(before, after)
    return False


def _weight(part: str, change: Change) -> Callable[[onnx.ModelProto], bool]:
    """Return a change of a part of the first quantized weight.

    The part is its levels, its scale or its zero point.
    """

    def inject(model: onnx.ModelProto) -> bool:
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for name, tensor in sorted(tensors.items()):
            if name.endswith("_quantized") and len(tensor.dims) >= 2:
                stem = name.removesuffix("_quantized")
                return _change(model, name if part == "levels" else f"{stem}_{part}", change)
        return False

    return inject


def _first_up(array: Any) -> Any:
    """Increase one channel by 10 %.

    If there is a scale for each channel, its scale changes, else its levels along the last axis.
    """
    whole = array.astype(np.float64)
    whole[..., 0] *= 1.1
    return np.rint(whole) if array.dtype == np.int8 else whole


def _channel(model: onnx.ModelProto) -> bool:
    scales = [
        t
        for t in model.graph.initializer
        if t.name.endswith("_scale") and np.prod(t.dims, dtype=int) > 1
    ]
    return _weight("scale" if scales else "levels", _first_up)(model)


def _bias(model: onnx.ModelProto) -> bool:
    """Set the first bias to zero, whether it is quantized or left in float."""
    for tensor in sorted(model.graph.initializer, key=lambda t: t.name):
        if "bias" in tensor.name and not tensor.name.endswith(("_scale", "_zero_point")):
            return _change(model, tensor.name, lambda a: a * 0)
    return False


def _activation(part: int, change: Change) -> Callable[[onnx.ModelProto], bool]:
    """Return a change of what DequantizeLinear reads of an activation.

    `part` is 1 for the scale and 2 for the zero point. QuantizeLinear keeps its own.
    """

    def inject(model: onnx.ModelProto) -> bool:
        made = {node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
        for node in model.graph.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in made:
                tensor = next(t for t in model.graph.initializer if t.name == node.input[part])
                copied = f"{tensor.name}.other"
                after = change(numpy_helper.to_array(tensor))
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(after), copied))
                node.input[part] = copied
                return True
        return False

    return inject


def _resized(factor: float, *places: int) -> Callable[[onnx.ModelProto], bool]:
    """Return a change of ranges of activations, at these places of the graph.

    It affects both the nodes that write a range and those that read it. Without places, it affects
    all ranges. A range counts by its scale, which nodes that only move values share. The input's
    range is the first.
    """

    def inject(model: onnx.ModelProto) -> bool:
        weights = {tensor.name for tensor in model.graph.initializer}
        scales = list(
            dict.fromkeys(
                node.input[1]
                for node in model.graph.node
                if node.op_type == "QuantizeLinear" and node.input[0] not in weights
            )
        )
        chosen = [scales[place] for place in places if place < len(scales)] if places else scales
        return len([scale for scale in chosen if _change(model, scale, lambda a: a * factor)]) > 0

    return inject


def _wide(model: onnx.ModelProto) -> bool:
    """Put every weight into a third of its levels."""
    names = {tensor.name for tensor in model.graph.initializer}
    found = False
    for stem in [
        name.removesuffix("_quantized") for name in sorted(names) if name.endswith("_quantized")
    ]:
        tensor = next(t for t in model.graph.initializer if t.name == f"{stem}_quantized")
        if tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8):
            found |= _change(model, tensor.name, lambda a: np.rint(a / 3.0))
            _change(model, f"{stem}_scale", lambda a: a * 3)
    return found


FAULTS: dict[str, tuple[Callable[[onnx.ModelProto], bool], ...]] = {
    "weight zero point off by one": (_weight("zero_point", lambda a: a + 1),),
    "weight scale +2 %": (_weight("scale", lambda a: a * 1.02),),
    "one channel +10 %": (_channel,),
    "channels rolled": (_weight("levels", lambda a: np.roll(a, 1, axis=0)),),
    "levels one lower": (
        _weight("levels", lambda a: np.maximum(a.astype(int) - 1, np.iinfo(a.dtype).min)),
    ),
    "weights in a third of their levels": (_wide,),
    "bias dropped": (_bias,),
    "activation zero point off by one": (_activation(2, lambda a: (a + 1).astype(a.dtype)),),
    "activation scale +2 %": (_activation(1, lambda a: (a * 1.02).astype(a.dtype)),),
    "input range halved": (_resized(0.5, 0),),
    "inner range halved": tuple(_resized(0.5, place) for place in (1, 2, 3)),
    "inner range three times too wide": tuple(_resized(3.0, place) for place in (1, 2, 3)),
    "every range three times too wide": (_resized(3.0),),
}
"""Faults by name, each at all of its places."""
