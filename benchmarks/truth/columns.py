"""Parity verdicts by column on correct exports that are hard to judge.

They have small heads beside large ones, rare events, rankings with ties, and hard sums, or are
Gaussian processes. Each world is drawn from a seed, and exported by PyTorch's TorchScript exporter
or by skl2onnx. These exports are taken as correct. Into some of them, faults are injected.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import helper, numpy_helper
from sklearn.gaussian_process import GaussianProcessRegressor
from torch import nn

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import derive_seed
from benchmarks.truth.evidence import evidence
from onnx_ops.adapters.exporters.signature import name_outputs
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import ParityColumn
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.measure.parity import measure_group, measure_parity
from onnx_ops.measure.reference_outputs import ReferenceGroup, collect_reference_outputs
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.ports import ExportRequest
from onnx_ops.statistics.probes import REAL
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.tools.compare import compare
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.supplied_rows import check_samples

TARGET = Target(name="truth")
ROWS, FEATURES, HIDDEN = 256, 12, 32
SEEDS, QUICK_SEEDS = 10, 2

HEADS = ((2e4, 4e3), (15.0, 6.0), (0.3, 0.05))
"""Mean and standard deviation of three answers of one output."""

RATES = (0.1, 0.04, 7e-3, 1e-3, 1e-4, 1e-6)
"""Mean probabilities of rare events."""

_GAUSSIAN_REFUSED = 0.3
"""Largest share of Gaussian processes that is refused.

A Gaussian process in float32 can be off by more than .1 % of its largest answer, which no estimate
excuses.
"""

SIGMOID_ERROR = 1.26e-7
"""Largest error of ONNX Runtime's sigmoid.

It was measured on two million logits in each of seven ranges of answers up to .9. It occurs at
answers below .01. At answers above .6, the largest error is 1.17e-7.
"""

Array = npt.NDArray[Any]
Run = Callable[[Any, torch.Tensor], Any]


class Net(nn.Module):
    """A module of named parts, and the function that computes its answer."""

    def __init__(self, run: Run, **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleDict(parts), run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.parts, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A correct export, and the answers of its source."""

    name: str
    path: Path
    rows: Array
    groups: list[ReferenceGroup]


def prove(*, quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    claims: list[Claim] = []
    refused: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        for family, makers in FAMILIES.items():
            refused_of_family = _list_refused(makers, folder, seeds)
            trials = len(makers) * len(seeds)
            promise = _GAUSSIAN_REFUSED if family == "Gaussian processes" else 0
            claims.append(
                at_most(
                    "columns", f"correct {family} refused", len(refused_of_family), trials, promise
                )
            )
            refused += refused_of_family
        claims += [
            _find_faults(fault, list(trials))
            for fault, trials in _list_faults(folder, seeds).items()
        ]
    if refused:
        table(
            "correct exports that are refused",
            ("world", "why"),
            [(world, why[:200]) for world, why in refused],
        )
    return claims


def _list_refused(makers: Sequence[str], folder: Path, seeds: range) -> list[tuple[str, str]]:
    """Return the names of correct worlds that the gate refuses, each with its reason."""
    refused = []
    for maker in makers:
        for seed in seeds:
            world = make(maker, folder, seed)
            result = _judge(world, world.path)
            if result.verdict is not Verdict.PASS:
                refused.append((f"{maker} {seed}", result.reason))
    return refused


def _find_faults(what: str, trials: list[bool]) -> Claim:
    return at_least("columns", f"{what} found", sum(trials), len(trials), 0.99)


def _list_faults(folder: Path, seeds: range) -> Mapping[str, Iterator[bool]]:
    """Return the kinds of faults, and for each fault whether it is found."""
    return {
        **{
            f"a head {share:g} wrong, {by}": _break_heads(folder, seeds, share, judge)
            for share in (0.05, 0.01)
            for by, judge in (("pipeline", _judge), ("two files with data", _judge_files))
        },
        "scores x 1.001 beside boxes": _break_scores(folder, seeds),
        "probabilities off by 10 times the kernel's error": _break_probabilities(folder, seeds),
        "one exchanged index on real rows": _exchange_indices(folder, seeds),
    }


def _break_heads(
    folder: Path, seeds: range, share: float, judge: Callable[[World, Path], GateResult]
) -> Iterator[bool]:
    for seed in seeds:
        world = make("heads", folder, seed)
        if seed == 0:
            _print_visible(world)
        for head in range(len(HEADS)):
            factors = np.ones(len(HEADS))
            factors[head] += share
            yield judge(world, _write_behind(world.path, "Mul", factors)).verdict is Verdict.FAIL


def _break_scores(folder: Path, seeds: range) -> Iterator[bool]:
    for seed in seeds:
        world = make("boxes and scores", folder, seed)
        factors = np.array([1, 1, 1, 1, 1.001, 1.001])
        yield _judge(world, _write_behind(world.path, "Mul", factors)).verdict is Verdict.FAIL


def _break_probabilities(folder: Path, seeds: range) -> Iterator[bool]:
    """Add ten times the sigmoid's error to the answers."""
    for rate in RATES:
        for seed in seeds:
            world = make(f"rate {rate:g}", folder, seed)
            if seed == 0:
                _print_visible(world)
            moved = _write_behind(world.path, "Add", np.array(10 * SIGMOID_ERROR))
            yield _judge(world, moved).verdict is Verdict.FAIL


def _exchange_indices(folder: Path, seeds: range) -> Iterator[bool]:
    """Exchange the first two indices of one row in which their values differ."""
    for name in ("sort", "topk"):
        for seed in seeds:
            world = make(name, folder, seed)
            group = next(group for group in world.groups if group.name == REAL)
            roundings = measure_roundings(OnnxRuntime(), world.path, {REAL: (group.inputs,)})[REAL]
            (answers,) = OnnxRuntime().run(world.path, TARGET, (group.inputs,))
            values, indices = (np.array(array) for array in answers.values())
            gaps = np.diff(values.astype(np.float64)[:, :2], axis=1)
            row = int(np.argmax(np.abs(gaps) > 1e-2))
            indices[row, :2] = indices[row, 1::-1]
            wrong = dict(zip(answers, (values, indices), strict=True))
            yield any(
                m.ratio > ParityGate().noise_factor for m in measure_group(group, wrong, roundings)
            )


def _print_visible(world: World) -> None:
    measured = measure_parity(OnnxRuntime(), world.path, TARGET, world.groups)
    columns: list[ParityColumn] = [column for m in measured for column in m.columns]
    rows = []
    for column in columns[:4]:
        smallest = column.noise * ParityGate().noise_factor
        share = f"{100 * smallest / column.scale:.2g} %" if column.scale else ""
        rows.append(
            (column.column or "the only one", f"{column.scale:.3g}", f"{smallest:.2g}", share)
        )
    title = f"{world.name}: smallest visible error by column"
    table(title, ("column", "largest answer", "visible from", "share of the largest answer"), rows)


def _judge(world: World, path: Path) -> GateResult:
    """Return the verdict of a pipeline's parity gate."""
    results = judge_parity(
        ParityGate(), evidence(parity=measure_parity(OnnxRuntime(), path, TARGET, world.groups))
    )
    return max((r for r in results if not r.advisory), key=lambda r: r.verdict.rank)


def _judge_files(world: World, path: Path) -> GateResult:
    """Return the verdict of two files on supplied rows."""
    samples = check_samples(
        shared_inputs(world.path, path), {"x": world.rows}, where="rows", limit=ROWS
    )
    result = compare(OnnxRuntime(), TARGET, world.path, path, samples)
    return GateResult(
        gate="parity", metric="outputs", limit="", verdict=result.verdict, reason=result.reason
    )


def _write_behind(path: Path, op_type: str, values: Array) -> Path:
    """Write a copy whose first output goes through one more operator."""
    model = onnx.load(path)
    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [f"{name}.before" if output == name else output for output in node.output]
        node.input[:] = [f"{name}.before" if value == name else value for value in node.input]
    model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), "fault"))
    model.graph.node.append(helper.make_node(op_type, [f"{name}.before", "fault"], [name]))
    copy = path.with_name("faulty.onnx")
    onnx.save(model, copy)
    return copy


def make(name: str, folder: Path, number: int) -> World:
    """Make one of the worlds with this name."""
    path, seed = folder / "world.onnx", derive_seed(number)
    if name == "gaussian process":
        draw = np.random.default_rng(seed)
        rows = draw.normal(size=(ROWS, 4)).astype(np.float32)
        model = GaussianProcessRegressor(random_state=seed).fit(
            rows[:80], np.sin(rows[:80]).sum(axis=1)
        )
        request = ExportRequest(section=Export(framework="sklearn"), samples={"x": rows}, path=path)
        SklearnExporter().export(model, request)
        groups = collect_reference_outputs(SklearnExporter(), model, path, {"x": rows}).groups
        return World(name=name, path=path, rows=rows, groups=groups)
    torch.manual_seed(seed)
    rows, net = WORLDS[name](seed)
    _export(net.eval(), rows, path)
    groups = collect_reference_outputs(TorchExporter(), net, path, {"x": rows}).groups
    return World(name=name, path=path, rows=rows, groups=groups)


def _export(net: nn.Module, rows: Array, path: Path) -> None:
    few = torch.from_numpy(rows[:2])
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        # If the export fails, the exporter of torch prints the graph to standard output.
        names = list(name_outputs(net(few)))
        torch.onnx.export(
            net,
            (few,),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in ("x", *names)},
        )


def _draw(seed: int, *shape: int) -> Array:
    return (
        np.random.default_rng(seed).normal(size=(ROWS, *(shape or (FEATURES,)))).astype(np.float32)
    )


def _perceptron(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, outputs),
    )


def _get_last(part: nn.Sequential) -> nn.Linear:
    return cast("nn.Linear", part[-1])


def _make_heads(seed: int) -> tuple[Array, nn.Module]:
    rows, parts = _draw(seed), [_perceptron(1) for _ in HEADS]
    with torch.no_grad():
        for part, (mean, deviation) in zip(parts, HEADS, strict=True):
            factor = deviation / float(part(torch.from_numpy(rows)).std())
            _get_last(part).weight.mul_(factor)
            _get_last(part).bias.mul_(factor)
            _get_last(part).bias.add_(mean - float(part(torch.from_numpy(rows)).mean()))
    return rows, Net(_join_heads, **{f"head{number}": part for number, part in enumerate(parts)})


def _join_heads(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part(x) for part in parts.values()], -1)


def _make_boxes(seed: int) -> tuple[Array, nn.Module]:
    """Make a net that answers ten boxes of 0 to 640, and two scores for each."""

    def run(parts: Any, x: torch.Tensor) -> torch.Tensor:
        boxes = (640 * torch.sigmoid(parts["boxes"](x))).reshape(-1, 10, 4)
        return torch.cat([boxes, torch.sigmoid(parts["scores"](x) - 3).reshape(-1, 10, 2)], -1)

    return _draw(seed), Net(run, boxes=_perceptron(40), scores=_perceptron(20))


def _make_rate(rate: float) -> Callable[[int], tuple[Array, nn.Module]]:
    def make_net(seed: int) -> tuple[Array, nn.Module]:
        rows, part = _draw(seed), _perceptron(1)
        with torch.no_grad():
            _get_last(part).weight.mul_(4)
            logits = part(torch.from_numpy(rows)).double()
            low, high = -40.0, 10.0
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (
                    (low, middle)
                    if torch.sigmoid(logits + middle).mean() > rate
                    else (middle, high)
                )
        shift = low
        return rows, Net(lambda parts, x: torch.sigmoid(parts["net"](x) + shift), net=part)

    return make_net


def _make_ranking(run: Run, outputs: int) -> Callable[[int], tuple[Array, nn.Module]]:
    return lambda seed: (_draw(seed), Net(run, net=_perceptron(outputs)))


def _select_boxes(parts: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the 20 best of 300 scores, and their boxes.

    This is the selection before a suppression of overlaps.
    """
    answers = parts["net"](x)
    scores, boxes = answers[:, :300], answers[:, 300:]
    best, indices = torch.topk(torch.sigmoid(scores), 20, -1)
    anchors = indices // 3
    chosen = torch.gather(boxes.reshape(-1, 100, 3), 1, anchors.unsqueeze(-1).expand(-1, -1, 3))
    return chosen, best, indices % 3


def _make_near_ties(seed: int) -> tuple[Array, nn.Module]:
    """Make a net with two classes whose last weights differ by about 1e-8."""
    part = _perceptron(2)
    with torch.no_grad():
        _get_last(part).weight[1] = _get_last(part).weight[0] * (1 + 1e-7) + 1e-8
        _get_last(part).bias[1] = _get_last(part).bias[0]
    return _draw(seed), Net(lambda parts, x: parts["net"](x).argmax(-1), net=part)


def _make_instance_norm(seed: int) -> tuple[Array, nn.Module]:
    def run(parts: Any, x: torch.Tensor) -> torch.Tensor:
        channels = torch.relu(parts["norm"](parts["conv"](x)))
        return cast("torch.Tensor", parts["head"](channels.mean((2, 3))))

    parts: dict[str, nn.Module] = {
        "conv": nn.Conv2d(3, 8, 3, padding=1),
        "norm": nn.InstanceNorm2d(8, affine=True),
        "head": nn.Linear(8, 6),
    }
    return _draw(seed, 3, 16, 16), Net(run, **parts)


def _make_clamped_log(seed: int) -> tuple[Array, nn.Module]:
    def run(parts: Any, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(3 * parts["net"](x), -1)
        return torch.log(torch.clamp(probabilities, min=1e-6))

    return _draw(seed), Net(run, net=_perceptron(8))


def _make_running_sum(seed: int) -> tuple[Array, nn.Module]:
    return _draw(seed, 500, 3), Net(lambda parts, x: torch.cumsum(x, 1))


def _make_wide_sum(seed: int) -> tuple[Array, nn.Module]:
    """Make a net with a product of 20,000 terms of one sign."""
    part = nn.Linear(20_000, 3)
    with torch.no_grad():
        part.weight.abs_()
    return np.abs(_draw(seed, 20_000)), Net(lambda parts, x: parts["net"](x), net=part)


WORLDS: Mapping[str, Callable[[int], tuple[Array, nn.Module]]] = {
    "heads": _make_heads,
    "boxes and scores": _make_boxes,
    **{f"rate {rate:g}": _make_rate(rate) for rate in RATES},
    "sort": _make_ranking(lambda parts, x: tuple(torch.sort(parts["net"](x), -1)), 500),
    "topk": _make_ranking(lambda parts, x: tuple(torch.topk(parts["net"](x), 10, -1)), 200),
    "topk of zeros": _make_ranking(
        lambda parts, x: tuple(torch.topk(torch.relu(5 * parts["net"](x)), 20, -1)), 30
    ),
    "argmax": _make_ranking(lambda parts, x: parts["net"](x).argmax(-1), 10),
    "argmax of near ties": _make_near_ties,
    "boxes by score": _make_ranking(_select_boxes, 600),
    "instance norm": _make_instance_norm,
    "clamp and log": _make_clamped_log,
    "running sum": _make_running_sum,
    "wide sum": _make_wide_sum,
}

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "heads of different size": ("heads", "boxes and scores"),
    "rare events": tuple(f"rate {rate:g}" for rate in RATES),
    "rankings": (
        "sort",
        "topk",
        "topk of zeros",
        "argmax",
        "argmax of near ties",
        "boxes by score",
    ),
    "hard sums": ("instance norm", "clamp and log", "running sum", "wide sum"),
    "Gaussian processes": ("gaussian process",),
}
