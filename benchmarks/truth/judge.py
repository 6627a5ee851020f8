"""Verdicts of `onnx-ops judge` on pairs of files whose truth is known."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from benchmarks.truth.claims import Claim, at_most, table
from benchmarks.truth.draws import derive_seed, make_generator
from benchmarks.truth.families import FAMILIES
from benchmarks.truth.faults import FAULTS
from benchmarks.truth.latency import LAYERS, WIDTH
from benchmarks.truth.parity import equivalence, optimize
from benchmarks.truth.quantization import FAULTS as ROUNDED_FAULTS
from benchmarks.truth.recipes import make, variants
from onnx_ops.adapters.optimizers.low_precision import Fp16Optimizer, WeightOnlyQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_kind import read_candidate_kind
from onnx_ops.ports import Dataset, OptimizeRequest
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.judge import judge_candidate
from onnx_ops.tools.judgement import JudgeRequest, SweepPoint, build_metric_gate
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.supplied_rows import check_samples

for _module in ("faults_ends", "faults_inputs"):
    # The import registers the faults of the module.
    importlib.import_module(f"benchmarks.truth.{_module}")

TARGET = TargetFiles(PROFILES).load("cpu-1t")
SLOWER = {"the same": 0, "+2 %": 2, "+10 %": 10, "+20 %": 20}
"""Additional layers of the candidate, by slow-down.

The time of the baseline consists of its `LAYERS` layers.
"""

REPEATS, QUICK_REPEATS = 5, 1
FAMILY_FAULTS, QUICK_FAMILIES = (
    ("mlp", "cnn", "transformer", "words", "trees", "scaler+linear"),
    ("mlp", "trees"),
)
ROUNDED, QUICK_ROUNDED = ("mlp", "cnn", "attention", "residual", "depthwise", "gru"), ("cnn",)
GOOD_RECIPES = ("per channel", "per tensor", "dynamic", "QOperator")
FAULTY_RECIPES = ("per channel", "dynamic")
MAX_DROP = 0.02

Kind = Literal["speed", "float", "rounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A judged pair, whether the candidate can replace the baseline, and the verdict."""

    kind: Kind
    name: str
    good: bool
    verdict: Verdict
    reason: str
    seconds: float

    @property
    def wrong(self) -> bool:
        return self.verdict is (Verdict.FAIL if self.good else Verdict.PASS)


def prove(*, quick: bool) -> list[Claim]:
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as name:
        folder = Path(name)
        pairs = [*_speed(folder, quick), *_floats(folder, quick), *_rounded(folder, quick)]
    wrong = [pair for pair in pairs if pair.wrong]
    open_ones = [pair for pair in pairs if pair.verdict not in (Verdict.PASS, Verdict.FAIL)]
    for title, listed in (("wrong", wrong), ("undecided", open_ones)):
        rows = [
            (
                pair.kind,
                pair.name,
                "good" if pair.good else "bad",
                pair.verdict.value,
                pair.reason[:140],
            )
            for pair in listed
        ]
        table(
            f"judge: {len(listed)} {title} of {len(pairs)}",
            ("kind", "pair", "truth", "verdict", "reason"),
            rows,
        )
    return list(_claims(pairs, quick))


def _claims(pairs: list[Pair], quick: bool) -> Iterator[Claim]:
    for good, what in ((True, "good candidates refused"), (False, "bad candidates passed")):
        chosen = [pair for pair in pairs if pair.good is good]
        yield at_most("judge", what, sum(pair.wrong for pair in chosen), len(chosen), 0.01)
    undecided = sum(pair.verdict not in (Verdict.PASS, Verdict.FAIL) for pair in pairs)
    yield at_most("judge", "undecided", undecided, len(pairs), 0.1)
    slowest = max(pair.seconds for pair in pairs)
    figure = f"{slowest:.1f} s; median {np.median([pair.seconds for pair in pairs]):.1f} s"
    yield Claim(gate="judge", what="longest verdict", bound="shown", figure=figure, is_met=True)


def _judged(
    kind: Kind,
    name: str,
    good: bool,
    baseline: Path,
    candidate: Path,
    dataset: Dataset | None = None,
    **changes: Any,
) -> Pair:
    begun = time.perf_counter()
    try:
        inputs = shared_inputs(baseline, candidate)
        if dataset is None:
            samples = generate_samples(
                inputs, count=128, dims={}, bounds=read_input_bounds(baseline)
            )
        else:
            samples = check_samples(inputs, dataset.inputs, where="rows", limit=128)
        found = judge_candidate(
            JudgeRequest(
                baseline=baseline,
                candidate=candidate,
                kind=read_candidate_kind(baseline, candidate),
                targets=(TARGET,),
                settings=(SweepPoint(name="", batch=1, samples=samples),),
                runtime=lambda _: OnnxRuntime(),
                inside=OnnxRuntime(),
                conditions=dict,
                metric=build_metric_gate(None, MAX_DROP, lower_is_better=False),
                dataset=dataset,
                **changes,
            )
        )
        verdict, reason = found.verdict, found.targets[0].decision.reason
    except UserError as error:  # For a bad candidate, a refusal is the right verdict.
        verdict, reason = Verdict.FAIL, f"refused: {error}"
    seconds = time.perf_counter() - begun
    return Pair(kind=kind, name=name, good=good, verdict=verdict, reason=reason, seconds=seconds)


def _speed(folder: Path, quick: bool) -> Iterator[Pair]:
    """Judge the same function with added layers that do not change the result."""
    baseline = write_slower(folder / "layers.onnx", 0)
    for slowdown, extra in SLOWER.items():
        candidate = baseline if not extra else write_slower(folder / f"layers-{extra}.onnx", extra)
        for trial in range(QUICK_REPEATS if quick else REPEATS):
            yield _judged(
                "speed",
                f"{slowdown}, trial {trial}",
                extra < 5,
                baseline,
                candidate,
                seed=derive_seed(trial),
            )


def write_slower(path: Path, extra: int) -> Path:
    """Write a model of `LAYERS` layers, with `extra` layers beside them.

    The result of the extra layers is multiplied by 0.
    """
    draw = np.random.default_rng(0)
    weights = [numpy_helper.from_array(np.zeros((), np.float32), "nothing")]
    nodes: list[onnx.NodeProto] = []

    def chain(value: str, name: str, count: int) -> str:
        for layer in range(count):
            matrix = (draw.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
            weights.append(numpy_helper.from_array(matrix, f"{name}.w{layer}"))
            nodes.append(
                helper.make_node("MatMul", [value, f"{name}.w{layer}"], [f"{name}.product{layer}"])
            )
            nodes.append(
                helper.make_node("Tanh", [f"{name}.product{layer}"], [f"{name}.layer{layer}"])
            )
            value = f"{name}.layer{layer}"
        return value

    last = chain("x", "main", LAYERS)
    spare = chain("main.layer0", "spare", extra) if extra else "x"
    nodes += [
        helper.make_node("Mul", [spare, "nothing"], ["none"]),
        helper.make_node("Add", [last, "none"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])
        for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path
    )
    return path


def _floats(folder: Path, quick: bool) -> Iterator[Pair]:
    """Judge faulty exports, and graphs that were changed without a fault.

    The latter were optimized, stored in another format or moved to another opset.
    """
    for family in QUICK_FAMILIES if quick else FAMILY_FAULTS:
        export = FAMILIES[family](family, folder / f"float-{family}.onnx", derive_seed(0))
        dataset, candidate = Dataset(inputs=export.samples), folder / "candidate.onnx"
        optimize(export.path, candidate, "extended")
        yield _judged(
            "float", f"{family}, optimized", True, export.path, candidate, dataset, only="parity"
        )
        if _other_opset(export.path, candidate):
            yield _judged(
                "float",
                f"{family}, other opset",
                True,
                export.path,
                candidate,
                dataset,
                only="parity",
            )
        stored = folder / "candidate.ort"
        optimize(export.path, stored, "basic")
        yield _judged("float", f"{family}, .ort", True, export.path, stored, dataset, only="parity")
        yield _judged(
            "float", f"{family}, beside .ort", True, stored, export.path, dataset, only="parity"
        )
        for number, (fault, inject) in enumerate(FAULTS.items()):
            model = onnx.load(export.path)
            del model.graph.value_info[:]
            before = model.SerializeToString(deterministic=True)
            changed = inject(model, make_generator(number))
            if not changed or model.SerializeToString(deterministic=True) == before:
                continue
            onnx.save(model, candidate)
            found = _judged(
                "float", f"{family}, {fault}", False, export.path, candidate, dataset, only="parity"
            )
            if found.verdict is Verdict.PASS and equivalence(export, candidate)[0]:
                continue
            yield found


def _other_opset(source: Path, path: Path) -> bool:
    model = onnx.load(source)
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    try:
        onnx.save(version_converter.convert_version(model, version + 1), path)
    except Exception:
        # The converter does not support all operators and domains, and raises errors of many types.
        return False
    return True


def _rounded(folder: Path, quick: bool) -> Iterator[Pair]:
    """Judge int8, float16 and blockwise 8-bit variants, sound and faulty ones.

    The faults are faults of rounding or of the graph.
    """
    for kind in QUICK_ROUNDED if quick else ROUNDED:
        model = make(kind, folder, derive_seed(1))
        dataset = Dataset(inputs={model.feed: model.scored}, label=model.labels)
        made = {name: path for name, path in variants(model, folder) if name in GOOD_RECIPES}
        made |= _narrow(model.path, folder)
        for recipe, path in made.items():
            yield _judged(
                "rounded", f"{kind}, {recipe}", True, model.path, path, dataset, only="parity"
            )
            faults: dict[str, Callable[[onnx.ModelProto], bool]] = dict(GRAPH_FAULTS)
            if recipe in FAULTY_RECIPES:
                faults |= {name: places[0] for name, places in ROUNDED_FAULTS.items()}
            for fault, inject in faults.items():
                wrong = onnx.load(path)
                if inject(wrong):
                    candidate = folder / "candidate.onnx"
                    onnx.save(wrong, candidate)
                    yield _judged(
                        "rounded",
                        f"{kind}, {recipe}, {fault}",
                        False,
                        model.path,
                        candidate,
                        dataset,
                        only="parity",
                    )


def _narrow(source: Path, folder: Path) -> dict[str, Path]:
    """Return a float16 variant, and one with 8 bits in blocks.

    The latter needs matrix products.
    """
    made = {}
    for name, optimizer, method, options in (
        ("float16", Fp16Optimizer(), "fp16", {}),
        ("8 bits in blocks", WeightOnlyQuantizer(), "weight-only", {"bits": 8, "block": 16}),
    ):
        path = folder / f"{source.stem}.{method}.onnx"
        section = Quantize(name="variant", method=method, options=options)
        try:
            optimizer.optimize(
                OptimizeRequest(section=section, source=source, path=path, calibration=None)
            )
        except UserError:  # For example, no weights of the model can be stored in blocks.
            continue
        made[name] = path
    return made


def _relu_lost(model: onnx.ModelProto) -> bool:
    found = [
        node for node in model.graph.node if node.op_type in ("Relu", "Tanh", "Gelu", "Softmax")
    ]
    for node in found[:1]:
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
    return bool(found)


def _negated(model: onnx.ModelProto) -> bool:
    return _behind(model, lambda before, after: helper.make_node("Neg", [before], [after]))


def _scaled(model: onnx.ModelProto) -> bool:
    """Make the answers larger by a tenth, which changes no class."""
    kind = model.graph.output[0].type.tensor_type.elem_type
    factor = np.array(1.1, helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(numpy_helper.from_array(factor, "tenth"))
    return _behind(model, lambda before, after: helper.make_node("Mul", [before, "tenth"], [after]))


def _behind(model: onnx.ModelProto, make_node: Callable[[str, str], onnx.NodeProto]) -> bool:
    name = model.graph.output[0].name
    for node in model.graph.node:
        for place, output in enumerate(node.output):
            if output == name:
                node.output[place] = f"{name}.before"
    model.graph.node.append(make_node(f"{name}.before", name))
    return True


GRAPH_FAULTS: dict[str, Callable[[onnx.ModelProto], bool]] = {
    "a function lost": _relu_lost,
    "negated": _negated,
    "a tenth larger": _scaled,
}
