"""Compare the variants that the search finds with other tools' presets.

Shown are their speed and accuracy. One run makes a CNN, an encoder of MiniLM's shape and two small
ones (one with outlier channels). Every tool makes its variants of them. All variants of a model are
then timed in turns, in one thread each, by that thread's CPU time. Accuracy is measured on rows
that no tool has seen. Limits are checked only on a CPU with AVX512-VNNI; elsewhere, the results are
only printed.

    python -m benchmarks.variants --peers FOLDER
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.variant_models import Model, make
from benchmarks.variant_tools import COSINE, DROP, TARGET, ort_defaults, others, ours, session
from onnx_ops.app.context import build_context
from onnx_ops.config.settings import load_settings
from onnx_ops.metric_formulas import cosine_rows
from onnx_ops.statistics.intervals import tango_interval

ROUNDS, RUNS = 15, 8
SURELY = 12
"""Number of rounds, of 15, that counts as certain.

It is reached by chance in 1.8 % of cases.
"""

LIMITS = {"cnn": 0.37, "minilm": 0.45, "encoder": 0.45, "encoder-outliers": 0.42}
MINILM_SIZE = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--width", type=int, default=256, help="of the encoders")
    parser.add_argument(
        "--peers", type=Path, help="folder for environments of Olive and Optimum; else not run"
    )
    asked = parser.parse_args()
    vnni = abilities()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings(action="ignore"):
        missed = [
            one
            for name in asked.models
            for one in measured(name, Path(scratch), asked.width, asked.peers)
        ]
    if not vnni:
        print("\nNot judged: this CPU has no AVX512-VNNI.")
        return 0
    print("\n" + ("\n".join(missed) or "Every limit is kept."))
    return int(bool(missed))


def measured(name: str, scratch: Path, width: int, peers: Path | None) -> Iterator[str]:
    """Make one model and all tools' variants of it, and print their results.

    Yields the limits that are missed.
    """
    model = make(name, scratch, width)
    ours(model, scratch)
    ort_defaults(model, scratch)
    others(model, scratch, peers and peers.resolve())
    yield from table(model)


def abilities() -> bool:
    """Print the features of this CPU; return whether it has AVX512-VNNI."""
    runtime = build_context(load_settings()).runtime(TARGET.runtime)
    hardware = runtime.fingerprint(TARGET)
    flags = [
        name
        for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
        if name in hardware.cpu_flags
    ]
    tools = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "onnx", "torch"))
    print(
        f"CPU: {hardware.cpu_model}, {hardware.cores} cores, {' '.join(flags)}; "
        f"{tools}; {platform.python_version()}"
    )
    return "avx512_vnni" in flags


def missed_limits(name: str, ratio: float, size: float) -> Iterator[str]:
    """Yield the limits of CPU time and size, as shares of fp32, that a variant misses."""
    if ratio > LIMITS[name]:
        yield f"{name}: {ratio:.2f} of fp32's CPU time, at most {LIMITS[name]} was asked for"
    if name == "minilm" and size > MINILM_SIZE:
        yield f"{name}: {size:.2f} of fp32's size, at most {MINILM_SIZE} was asked for"


def table(model: Model) -> Iterator[str]:
    """Print the results of one model, and yield the limits that are missed."""
    paths = {"fp32": model.path, **model.variants}
    times = timed(paths, model)
    sessions = {name: session(path) for name, path in paths.items()}
    ratios = {name: statistics.median(found / times["fp32"]) for name, found in times.items()}
    found = {name: answers(one, model) for name, one in sessions.items()}
    right = {name: rows for name, (rows, _) in found.items()}
    print(f"\n### {model.name}\n\n{model.search}\n")
    print(
        f"| variant | CPU time / fp32 | size / fp32 | {model.metric.name} | against fp32 (90 %) |"
    )
    print("|---|---|---|---|---|")
    sizes = {"fp32": model.path.stat().st_size} | {
        name: p.stat().st_size for name, p in model.variants.items()
    }
    for name in sessions:
        lost, gained = (right["fp32"] & ~right[name]).sum(), (~right["fp32"] & right[name]).sum()
        change, low, high = (
            100 * v for v in tango_interval(len(right[name]), int(lost), int(gained))
        )
        against = "" if name == "fp32" else f"{change:+.1f} [{low:+.1f}, {high:+.1f}]"
        size = sizes[name] / sizes["fp32"]
        print(f"| {name} | {ratios[name]:.2f} | {size:.2f} | {found[name][1]} | {against} |")
        if name.startswith("ours: auto-fast"):
            yield from missed_limits(model.name, ratios[name], size)
            if change < -100 * DROP and high < 0:
                yield f"{model.name}: accuracy fell by {-change:.1f} points"
    for name, why in model.failures.items():
        print(f"| {name} | | | | {why} |")
        if name.startswith("ours"):
            yield f"{model.name}: {why}"
    yield from compared(model, times, right)


def compared(
    model: Model, times: Mapping[str, np.ndarray[Any, Any]], right: Mapping[str, Any]
) -> Iterator[str]:
    """Print which variants are faster than ours and as accurate.

    Yields those for which this is certain.
    """
    own = next((name for name in times if name.startswith("ours: auto-fast")), "fp32")
    found = list(faster(times, right, own))
    said = "; ".join(f"{name} in {rounds} of {ROUNDS} rounds" for name, rounds in found)
    print(f"\nAs right as {own}, and faster: {said or 'none'}")
    for name, rounds in found:
        if rounds >= SURELY:
            yield f"{model.name}: {name} is as right and faster"


def timed(paths: Mapping[str, Path], model: Model) -> dict[str, np.ndarray[Any, Any]]:
    """Return the thread's CPU time of each round, by variant.

    Each round has a fresh session, since its place in memory changes the time by some percent. The
    order of a round is drawn anew.
    """
    rng = np.random.default_rng(0)
    feed = {model.feed: model.test[0][:1]}
    rounds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(ROUNDS):
        for name in rng.permutation(list(paths)):
            fresh = session(paths[name])
            for _ in range(2):
                fresh.run(None, feed)
            begun = time.thread_time_ns()
            for _ in range(RUNS):
                fresh.run(None, feed)
            rounds[name].append(float(time.thread_time_ns() - begun))
    return {name: np.asarray(found) for name, found in rounds.items()}


def faster(
    times: Mapping[str, np.ndarray[Any, Any]], right: Mapping[str, Any], own: str
) -> Iterator[tuple[str, int]]:
    """Yield other tools' variants that were faster than `own` in most rounds.

    The second value is the number of these rounds. Variants that are proven less accurate are left
    out.
    """
    for name in times:
        lost, gained = (right[own] & ~right[name]).sum(), (~right[own] & right[name]).sum()
        _, _, high = tango_interval(len(right[name]), int(lost), int(gained))
        rounds = int((times[name] < times[own]).sum())
        if not name.startswith("ours") and high >= 0 and rounds > ROUNDS / 2:
            yield name, rounds


def answers(one: Any, model: Model) -> tuple[Any, str]:
    """Return which rows are right, and the metric as a text.

    Rows are sent one at a time, so that no batch shares its ranges. A row of the embedder is right
    if its cosine is at least `COSINE`.
    """
    rows, wanted = model.test
    outputs = np.concatenate(
        [one.run(None, {model.feed: rows[at : at + 1]})[0] for at in range(len(rows))]
    )
    if model.metric.name == "cosine":
        cosines = cosine_rows(outputs, wanted)
        return cosines >= COSINE, f"{cosines.mean():.4f}"
    right = outputs.argmax(axis=1) == wanted
    return right, f"{100 * right.mean():.1f} %"


if __name__ == "__main__":
    sys.exit(main())
