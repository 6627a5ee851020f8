"""Models whose inputs are not all rows: state, scalars, graph edges, independent sizes; their right and wrong copies.

Each model is drawn anew: its architecture, sizes, weights, and the names of its free dimensions. `judge` compares it
with copies that compute the same (renamed, optimized by ONNX Runtime, of another opset, with other names of dimensions)
and with wrong ones: a state of another row, exchanged inputs, indices that are cut off, a length that is, a scalar that
is ignored, another branch. A wrong copy counts if its answers differ by more than 1 % on requests that the architecture
itself makes, which the judge does not see.

    python -m benchmarks.foreign_requests --models 60

The seed is new in each run and printed. The script ends with 1 if a wrong copy passes, or more than 2 % of the right
copies do not.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from benchmarks.foreign_architectures import KINDS, Specimen
from benchmarks.foreign_copies import differ, run_model
from benchmarks.foreign_graphs import Draw, iterate_nodes
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.errors import OnnxOpsError
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.tools.compare import REFERENCE, compare
from onnx_ops.tools.generated_rows import generate_samples, settle_samples
from onnx_ops.tools.model_inputs import shared_inputs

_RUNTIME, _TARGET = OnnxRuntime(), TargetFiles(PROFILES).load("cpu-1t")
_MOST_REFUSED = 0.02
_REQUESTS = 6
"""Requests on which a wrong copy must differ from the model."""


def _rename(model: onnx.ModelProto) -> None:
    """Give all inner values, weights and nodes other names."""
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"t{len(names)}")

    for node in iterate_nodes(model.graph):
        node.name = ""
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)
        for attribute in node.attribute:
            for value in attribute.g.output if attribute.HasField("g") else ():
                value.name = new(value.name)
    for tensor in model.graph.initializer:
        tensor.name = new(tensor.name)


def _rename_dimensions(model: onnx.ModelProto) -> None:
    """Give each free dimension a different name."""
    for value in model.graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if not dimension.HasField("dim_value"):
                dimension.dim_param = f"{value.name}_{axis}"


def right_copies(model: onnx.ModelProto, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies that compute the same."""
    import onnxruntime as ort

    source = folder / "model.onnx"
    for name, change in {"other names": _rename, "other names of dimensions": _rename_dimensions}.items():
        copy = onnx.ModelProto.FromString(model.SerializeToString())
        change(copy)
        yield name, _save(copy, folder / f"{name}.onnx")
    for level in ("BASIC", "EXTENDED"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(folder / f"{level.lower()}.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        yield f"optimized by ONNX Runtime, {level.lower()}", Path(options.optimized_model_filepath)
    yield "opset 20", _save(onnx.version_converter.convert_version(model, 20), folder / "opset.onnx")


def wrong_copies(specimen: Specimen, folder: Path, draw: Draw) -> Iterator[tuple[str, Path]]:
    """Yield copies with one change each whose answers differ."""
    requests = [specimen.feed(draw) for _ in range(_REQUESTS)]
    right = [run_model(folder / "model.onnx", request) for request in requests]
    for name, change in specimen.wrong.items():
        copy = onnx.ModelProto.FromString(specimen.model.SerializeToString())
        change(copy)
        path = _save(copy, folder / f"{name}.onnx")
        answers = [run_model(path, request) for request in requests]
        if any(one and differ(known, one) for known, one in zip(right, answers, strict=True)):
            yield name, path


def _save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save_model(model, path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One verdict. `wrong` is whether the copy is."""

    kind: str
    number: int
    copy: str
    wrong: bool
    verdict: str
    reason: str

    @property
    def is_fault(self) -> bool:
        """Return whether the verdict contradicts the truth, or a right copy has none."""
        return self.verdict == "pass" if self.wrong else self.verdict != "pass"


def measure(models: int, seed: int, folder: Path, only: str = "") -> Iterator[Outcome]:
    """Judge all copies of so many models."""
    for number in range(models):
        draw = np.random.default_rng((seed, number))
        specimen = KINDS[number % len(KINDS)](draw)
        if only not in specimen.kind:
            continue
        place = folder / str(number)
        place.mkdir()
        source = _save(specimen.model, place / "model.onnx")
        if not all(run_model(source, specimen.feed(draw)) for _ in range(_REQUESTS)):
            raise ValueError(f"{specimen.kind} {number} does not take its own requests")
        copies = [(name, path, False) for name, path in right_copies(specimen.model, place)]
        copies += [(name, path, True) for name, path in wrong_copies(specimen, place, draw)]
        for name, path, wrong in copies:
            verdict, reason = _judge(source, path)
            yield Outcome(kind=specimen.kind, number=number, copy=name, wrong=wrong, verdict=verdict, reason=reason)


def _judge(a: Path, b: Path) -> tuple[str, str]:
    """Compare two files as `judge --only parity --rows 64` does, but in this process, and return verdict and reason."""
    try:
        samples = generate_samples(shared_inputs(a, b), count=64, dims={}, bounds=read_input_bounds(a))
        samples = settle_samples(_RUNTIME, REFERENCE, a, samples)
        result = compare(_RUNTIME, _TARGET, a, b, samples)
    except OnnxOpsError as error:
        return "refused", str(error)
    return result.verdict.value, result.reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--seed", type=int, help="default: new in each run")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(measure(arguments.models, seed, Path(folder), arguments.only))
    passed, refused, right = _print_outcomes(outcomes)
    print(f"{time.perf_counter() - began:.0f} s")
    return int(passed > 0 or refused > _MOST_REFUSED * right)


def _print_outcomes(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """Print the faults, and the counts of verdicts.

    Returns:
        How many wrong copies passed, how many right copies did not pass, and how many right copies there are.
    """
    for outcome in outcomes:
        if outcome.is_fault:
            print(f"{outcome.kind} {outcome.number}, {outcome.copy}: {outcome.verdict}: {outcome.reason}")
    counts = Counter((outcome.kind, outcome.wrong, outcome.verdict) for outcome in outcomes)
    for (kind, wrong, verdict), count in sorted(counts.items()):
        print(f"{kind:28} {'wrong' if wrong else 'right'} {verdict:12} {count}")
    right = sum(not outcome.wrong for outcome in outcomes)
    passed = sum(outcome.is_fault for outcome in outcomes if outcome.wrong)
    refused = sum(outcome.is_fault for outcome in outcomes if not outcome.wrong)
    print(f"{len(outcomes) - right} wrong copies: {passed} PASS; {right} right copies: {refused} refused")
    return passed, refused, right


if __name__ == "__main__":
    sys.exit(main())
