"""How fast and how right the variants are that the search finds, beside those of other tools' presets.

One run: a CNN and two encoders (one with outlier channels) are made, every tool makes its variants of them, and all
variants of a model are then timed in turns, in one thread each, by that thread's CPU time. Accuracy is on rows that no
tool has seen. Figures are judged only on a CPU with AVX512-VNNI; elsewhere they are printed.

    python benchmarks/variants.py --peers FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from variant_peers import PRESETS, Preset, Work, interpreter

from onnx_ops.adapters.journals import FileJournal
from onnx_ops.analysis.agreement import tango_interval
from onnx_ops.domain.metric import ACCURACY
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.search import Budget
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Dataset
from onnx_ops.settings import load_settings
from onnx_ops.stages.derive import machines_of
from onnx_ops.stages.search import search
from onnx_ops.stages.trying import Ground
from onnx_ops.wiring import connect

ROUNDS, RUNS = 15, 4
SURELY = 12
"""Of 15 rounds by chance in 1.8 % of cases."""

DROP = 0.01
FITTED, TUNED, TESTED = 512, 256, 384
"""Rows of the encoders: for the head, for decisions, for the score."""

HINT = 0.1
"""Share of tokens that are of the kind that a row has most of: what makes the task neither trivial nor hopeless."""

LIMITS = {"cnn": 0.45, "encoder": 0.50, "encoder-outliers": 0.50}
MINUTES = {"cnn": 1.0, "encoder": 5.0, "encoder-outliers": 5.0}
TARGET = Target(name="cpu-1t")


@dataclass(kw_only=True)
class Model:
    """A float model in a file, rows for ranges, for decisions and for the score, and its variants by tool."""

    name: str
    path: Path
    feed: str
    calibration: np.ndarray[Any, Any]
    tune: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    test: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    variants: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    search: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--width", type=int, default=256, help="of the encoders")
    parser.add_argument("--peers", type=Path, help="folder for environments of Olive and Optimum; else not run")
    asked = parser.parse_args()
    vnni = abilities()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings(action="ignore"):
        missed = [one for name in asked.models for one in measured(name, Path(scratch), asked.width, asked.peers)]
    if not vnni:
        print("\nNot judged: this CPU has no AVX512-VNNI.")
        return 0
    print("\n" + ("\n".join(missed) or "Every limit is kept."))
    return int(bool(missed))


def measured(name: str, scratch: Path, width: int, peers: Path | None) -> Iterator[str]:
    """Make one model and everybody's variants of it, and print their figures; yields the limits that are missed."""
    model = make(name, scratch, width)
    ours(model, scratch)
    ort_defaults(model, scratch)
    others(model, scratch, peers and peers.resolve())
    yield from table(model)


def abilities() -> bool:
    """Print what this CPU can do; tells whether it has AVX512-VNNI."""
    runtime = connect(load_settings()).runtime(TARGET.runtime)
    hardware = runtime.fingerprint(TARGET)
    flags = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if name in hardware.cpu_flags]
    tools = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "onnx", "torch"))
    print(f"CPU: {hardware.cpu_model}, {hardware.cores} cores, {' '.join(flags)}; {tools}; {platform.python_version()}")
    return "avx512_vnni" in flags


# --- models -----------------------------------------------------------------------------------------------------------


def make(name: str, scratch: Path, width: int) -> Model:
    folder = scratch / name
    folder.mkdir()
    return cnn(folder) if name == "cnn" else encoder(name, folder, width)


def cnn(folder: Path) -> Model:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order]

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.spread = nn.Conv2d(width, width, 3, padding=1, groups=width)
            self.mix = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.mix(torch.relu(self.spread(x))))

    model = nn.Sequential(
        nn.Conv2d(1, 128, 3, padding=1), nn.ReLU(), Block(128), Block(128), nn.MaxPool2d(2),
        nn.Conv2d(128, 192, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192 * 16, 10),
    )  # fmt: skip
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    x, y = torch.from_numpy(images[:800]), torch.from_numpy(labels[:800])
    for epoch in range(6):
        for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(50):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    path = exported(model.eval(), x[:2], folder / "model.onnx")
    return Model(
        name="cnn",
        path=path,
        feed="x",
        calibration=images[:256],
        tune=(images[800:1200], labels[800:1200]),
        test=(images[1200:], labels[1200:]),
    )


def encoder(name: str, folder: Path, width: int) -> Model:
    """Six layers over 128 tokens whose weights are drawn, and a head that is fitted to its features.

    Outlier channels are made by scaling channels of a normalization up and the columns of the products that read it
    down: the function in float is the same.
    """
    import torch

    body, tokens, labels = fitted(width)
    body = copy.deepcopy(body)
    if name.endswith("outliers"):
        with torch.no_grad():
            spread_outliers(body, width)
    path = exported(body.eval(), torch.from_numpy(tokens[:2]), folder / "model.onnx")
    return Model(
        name=name,
        path=path,
        feed="x",
        calibration=tokens[:64],
        tune=(tokens[FITTED : FITTED + TUNED], labels[FITTED : FITTED + TUNED]),
        test=(tokens[FITTED + TUNED :], labels[FITTED + TUNED :]),
    )


@functools.cache
def fitted(width: int) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The encoder, its tokens and labels: the most common of eight kinds of token in a row."""
    import torch

    torch.manual_seed(0)
    body = encoder_body(width)
    rng = np.random.default_rng(0)
    favoured = rng.integers(0, 8, FITTED + TUNED + TESTED)
    tokens = rng.integers(0, 64, (len(favoured), 128))
    hinted = rng.random(tokens.shape) < HINT
    tokens = np.where(hinted, tokens // 8 * 8 + favoured[:, None], tokens)
    labels = np.stack([(tokens % 8 == kind).sum(axis=1) for kind in range(8)], axis=1).argmax(axis=1)
    with torch.no_grad():
        parts = [body.features(torch.from_numpy(tokens[at : at + 64])) for at in range(0, FITTED, 64)]
        found = torch.cat(parts).double().numpy()
        middle, targets = found.mean(axis=0), np.eye(8)[labels[:FITTED]] - 0.125
        spread = (found - middle).T @ (found - middle)
        ridge = 1e-3 * np.trace(spread) / width * np.eye(width)
        solved = np.linalg.solve(spread + ridge, (found - middle).T @ targets)
        body.head.weight.copy_(torch.from_numpy(solved.T))
        body.head.bias.copy_(torch.from_numpy(0.125 - middle @ solved))
    return body, tokens, labels


def encoder_body(width: int) -> Any:
    import torch
    from torch import nn

    heads = width // 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.read(self.before(x)).unflatten(2, (3, heads, 64)).permute(2, 0, 3, 1, 4)
            weights = torch.softmax(parts[0] @ parts[1].transpose(2, 3) / 8.0, dim=3)
            x = x + self.write((weights @ parts[2]).transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, width)
            self.layers = nn.ModuleList([Layer() for _ in range(6)])
            self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)
            for layer in self.layers:
                x = layer(x)
            return self.last(x).mean(dim=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x))

    return Encoder()


def spread_outliers(body: Any, width: int) -> None:
    channels = np.random.default_rng(1).choice(width, 4, replace=False)
    for layer in body.layers:
        for norm, reader in ((layer.before, layer.read), (layer.between, layer.up)):
            norm.weight[channels] *= 60
            norm.bias[channels] *= 60
            reader.weight[:, channels] /= 60


def exported(model: Any, example: Any, path: Path) -> Path:
    import torch

    shapes = ({0: torch.export.Dim("batch")},)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(
            model, (example,), str(path), dynamo=True, input_names=["x"], output_names=["scores"],
            dynamic_shapes=shapes, external_data=False, opset_version=18, verbose=False,
        )  # fmt: skip
    return path


# --- tools ------------------------------------------------------------------------------------------------------------


def ours(model: Model, scratch: Path) -> None:
    """The search, told nothing but the budget."""
    ports = connect(load_settings())
    folder = scratch / model.name / "ours"
    (folder / "source").mkdir(parents=True)
    source = folder / "source" / "model.onnx"
    source.write_bytes(model.path.read_bytes())
    section = Quantize(name="auto", method="auto", calibrate=Calibrate(samples=len(model.calibration)))
    ground = Ground(
        ports=ports,
        section=section,
        source=source,
        folder=folder / "trials",
        targets=(TARGET,),
        machines=machines_of(ports, (TARGET,)),
        tune=Dataset(inputs={model.feed: model.tune[0]}, label=model.tune[1]),
        calibration={model.feed: model.calibration},
        metric=ACCURACY,
        lower=False,
        batch=1,
        budget=Budget(metric_drop=DROP, max_minutes=MINUTES[model.name]),
        seed=0,
    )
    begun, busy = time.perf_counter(), time.process_time()
    found = search(
        ground, FileJournal(folder / "journal"), lambda line: print(f"  {model.name}: {line}", file=sys.stderr)
    )
    model.search = (
        f"{len(found.record.trials)} models, {len(found.record.sensitivities)} nodes probed, "
        f"{time.perf_counter() - begun:.0f} s, {time.process_time() - busy:.0f} CPU-seconds; {found.record.stopped}"
    )
    for role, (path, trial) in found.models.items():
        kept = f", {len(trial.excluded)} in float" if trial.excluded else ""
        model.variants[f"ours: auto-{role} ({trial.recipe}{kept})"] = path
    if "fast" not in found.models:
        model.failures["ours: auto-fast"] = next(s.reason for s in found.record.slots if s.role == "fast")


def ort_defaults(model: Model, scratch: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter(np.array_split(model.calibration, len(model.calibration) // 8))

        def get_next(self) -> Any:
            return next(({model.feed: rows} for rows in self.rows), None)

    folder, source = scratch / model.name, prepared(model, scratch)
    attempt(model, "ORT quantize_dynamic, default", folder / "dynamic.onnx",
            lambda path: quantize_dynamic(str(source), str(path)))  # fmt: skip
    attempt(model, "ORT quantize_static, default (S8S8)", folder / "static.onnx",
            lambda path: quantize_static(str(source), str(path), Reader()))  # fmt: skip


def prepared(model: Model, scratch: Path) -> Path:
    """The export after ORT's own preparation, without the shapes that torch wrote: with them its quantizers raise."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    path = scratch / model.name / "prepared.onnx"
    if not path.exists():
        quant_pre_process(str(model.path), str(path), skip_symbolic_shape=True)
        loaded = onnx.load(path)
        del loaded.graph.value_info[:]
        onnx.save(loaded, path)
    return path


def others(model: Model, scratch: Path, folder: Path | None) -> None:
    """Presets of Olive and Optimum; one that torch's shapes make fail is tried again after ORT's preparation."""
    for tool in dict.fromkeys(preset.tool for preset in PRESETS):
        presets = [preset for preset in PRESETS if preset.tool == tool]
        if folder is None:
            model.failures[f"{tool}, {len(presets)} presets"] = "not run: --peers was not given"
            continue
        try:
            python = interpreter(tool, folder)
        except OnnxOpsError as error:
            model.failures[f"{tool}, {len(presets)} presets"] = f"cannot be installed: {told(error)}"
            continue
        again = tried(model, scratch, python, presets, "")
        tried(model, scratch, python, again, ", after quant_pre_process")


def tried(model: Model, scratch: Path, python: Path, presets: Sequence[Preset], suffix: str) -> list[Preset]:
    """Run presets, four at a time; returns those that stumble over the shapes that torch wrote."""
    source = prepared(model, scratch) if suffix else model.path
    with ThreadPoolExecutor(4) as pool:
        running: dict[str, tuple[Preset, Path, Future[None]]] = {}
        for preset in presets:
            name = f"{preset.tool} {preset.name}{suffix}"
            place = Path(tempfile.mkdtemp(dir=scratch))
            work = Work(
                python=python, source=source, feed=model.feed, rows=model.calibration, folder=place,
                out=place / "taken.onnx",
            )  # fmt: skip
            running[name] = preset, work.out, pool.submit(preset.make, work)
    for name, (_, out, future) in running.items():
        attempt(model, name, out, lambda _, future=future: future.result())
    return [preset for name, (preset, *_) in running.items() if "ShapeInference" in model.failures.get(name, "")]


def attempt(model: Model, name: str, path: Path, make_it: Callable[[Path], object]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make_it(path)
            session(path).run(None, {model.feed: model.test[0][:1]})
        model.variants[name] = path
    except Exception as error:  # other people's tools raise anything
        model.failures[name] = told(error)


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160].replace('|', '/')}"


# --- figures ----------------------------------------------------------------------------------------------------------


def table(model: Model) -> Iterator[str]:
    """Print the figures of one model; yields the limits that are missed."""
    sessions = {"fp32": session(model.path)} | {name: session(path) for name, path in model.variants.items()}
    times = timed(sessions, model)
    ratios = {name: statistics.median(found / times["fp32"]) for name, found in times.items()}
    right = {name: answers(one, model) for name, one in sessions.items()}
    print(f"\n### {model.name}\n\n{model.search}\n")
    print("| variant | CPU time / fp32 | size / fp32 | accuracy | against fp32 (90 %) |\n|---|---|---|---|---|")
    sizes = {"fp32": model.path.stat().st_size} | {name: p.stat().st_size for name, p in model.variants.items()}
    for name in sessions:
        lost, gained = (right["fp32"] & ~right[name]).sum(), (~right["fp32"] & right[name]).sum()
        change, low, high = (100 * v for v in tango_interval(len(right[name]), int(lost), int(gained)))
        against = "" if name == "fp32" else f"{change:+.1f} [{low:+.1f}, {high:+.1f}]"
        size = sizes[name] / sizes["fp32"]
        print(f"| {name} | {ratios[name]:.2f} | {size:.2f} | {100 * right[name].mean():.1f} % | {against} |")
        if name.startswith("ours: auto-fast"):
            if ratios[name] > LIMITS[model.name]:
                yield f"{model.name}: {ratios[name]:.2f} of fp32's CPU time, at most {LIMITS[model.name]} was asked for"
            if change < -100 * DROP and high < 0:
                yield f"{model.name}: accuracy fell by {-change:.1f} points"
    for name, why in model.failures.items():
        print(f"| {name} | | | | {why} |")
        if name.startswith("ours"):
            yield f"{model.name}: {why}"
    yield from compared(model, times, right)


def compared(model: Model, times: Mapping[str, np.ndarray[Any, Any]], right: Mapping[str, Any]) -> Iterator[str]:
    """Print who is faster than ours and as right; yields who surely is."""
    own = next((name for name in times if name.startswith("ours: auto-fast")), "fp32")
    found = list(faster(times, right, own))
    said = "; ".join(f"{name} in {rounds} of {ROUNDS} rounds" for name, rounds in found)
    print(f"\nAs right as {own}, and faster: {said or 'none'}")
    for name, rounds in found:
        if rounds >= SURELY:
            yield f"{model.name}: {name} is as right and faster"


def session(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def timed(sessions: Mapping[str, Any], model: Model) -> dict[str, np.ndarray[Any, Any]]:
    """The thread's CPU time of each round, the order of a round drawn anew."""
    rng = np.random.default_rng(0)
    feed = {model.feed: model.test[0][:1]}
    for one in sessions.values():
        one.run(None, feed)
    rounds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name in rng.permutation(list(sessions)):
            begun = time.thread_time_ns()
            for _ in range(RUNS):
                sessions[name].run(None, feed)
            rounds[name].append(float(time.thread_time_ns() - begun))
    return {name: np.asarray(found) for name, found in rounds.items()}


def faster(times: Mapping[str, np.ndarray[Any, Any]], right: Mapping[str, Any], own: str) -> Iterator[tuple[str, int]]:
    """Variants of others that were faster than `own` in most rounds, and in how many: those not surely less right."""
    for name in times:
        lost, gained = (right[own] & ~right[name]).sum(), (~right[own] & right[name]).sum()
        _, _, high = tango_interval(len(right[name]), int(lost), int(gained))
        rounds = int((times[name] < times[own]).sum())
        if not name.startswith("ours") and high >= 0 and rounds > ROUNDS / 2:
            yield name, rounds


def answers(one: Any, model: Model) -> Any:
    """Which rows are right, asked one at a time, so that no batch shares its ranges."""
    rows, labels = model.test
    said = [one.run(None, {model.feed: rows[at : at + 1]})[0].argmax() for at in range(len(rows))]
    return np.asarray(said) == labels


if __name__ == "__main__":
    sys.exit(main())
