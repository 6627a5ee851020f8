"""Measure what CUDA changes in answers, latency and verdicts.

The models are ResNet-50, an encoder of MiniLM's shape and a small perceptron. The benchmark needs
an NVIDIA GPU, onnxruntime-gpu and torch. Weights are random, since only shapes matter to what is
measured. Latencies, sizes and verdicts come from the commands that users run: `bench`, `quantize`
and `judge`. Differences of answers come from sessions of ONNX Runtime, with and without TF32.

    python -m benchmarks.cuda --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = {"cuda": 400, "cpu-all": 40}
"""Timed runs of each target."""
BATCHES = (1, 32)
INPUTS = {"resnet50": (3, 224, 224), "encoder": (128, 384), "mlp": (64,)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of models, which are made where missing"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=4,
        help="judgements of a model against its copy, for each model",
    )
    parser.add_argument("--only-models", action="store_true", help="make them and end")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in INPUTS:
        if not (path := asked.folder / f"{name}.onnx").exists():
            _write(name, path)
    if asked.only_models:
        return 0
    parts = (
        _variants(asked.folder),
        _times(asked.folder),
        _answers(asked.folder),
        _verdicts(asked.folder, asked.pairs),
    )
    for line in chain.from_iterable(parts):
        print(line, flush=True)
    return 0


def _variants(folder: Path) -> Iterator[str]:
    yield "\n| variant | made in | size | note |\n|---|---|---|---|"
    for name in ("resnet50", "encoder"):
        for method in ("fp16", "static"):
            if (out := folder / f"{name}-{method}.onnx").exists():
                continue
            begun = time.perf_counter()
            data: list[str] = []
            if method == "static":
                np.savez(rows := folder / f"{name}.npz", x=_rows(name, 32))
                data = ["--data", str(rows)]
            done = _call(
                "quantize",
                folder / f"{name}.onnx",
                out,
                "--method",
                method,
                "--target",
                "cuda",
                *data,
            )
            size = (
                f"{out.stat().st_size / (folder / f'{name}.onnx').stat().st_size:.2f} times"
                if out.exists()
                else ""
            )
            yield f"| {out.stem} | {time.perf_counter() - begun:.0f} s | {size} | {_error(done)} |"


def _times(folder: Path) -> Iterator[str]:
    yield (
        "\n| file | batch | target | p50 | p99 | nodes | seconds of the command "
        "|\n|---|---|---|---|---|---|---|"
    )
    for path in sorted(folder.glob("*.onnx")):
        for batch in BATCHES:
            for target, runs in TARGETS.items():
                if target != "cuda" and "-" in path.stem:
                    continue
                begun = time.perf_counter()
                done = _call(
                    "bench",
                    path,
                    "--target",
                    target,
                    "--batch",
                    str(batch),
                    "--runs",
                    str(runs),
                    "--json",
                )
                took = time.perf_counter() - begun
                if done.returncode:
                    yield f"| {path.stem} | {batch} | {target} | {_error(done)} |"
                    continue
                found = json.loads(done.stdout)
                p50, p99 = (1e3 * found["metrics"][name]["value"] for name in ("p50", "p99"))
                nodes = ", ".join(
                    f"{count} {name}" for name, count in found["facts"]["nodes"].items()
                )
                yield (
                    f"| {path.stem} | {batch} | {target} | {p50:.3f} ms | {p99:.3f} ms | {nodes} "
                    f"| {took:.0f} |"
                )


def _answers(folder: Path) -> Iterator[str]:
    """Yield a table of the largest difference from float32 on the CPU.

    A difference is a share of the largest answer. It is measured with and without TF32.
    """
    import onnxruntime as ort

    yield "\n| file | TF32 off | TF32 on |\n|---|---|---|"
    for path in sorted(folder.glob("*.onnx")):
        base = path.stem.split("-")[0]
        feed = {"x": _rows(base, 8)}
        session = ort.InferenceSession(
            str(folder / f"{base}.onnx"), providers=["CPUExecutionProvider"]
        )
        (reference,) = session.run(None, feed)
        shares = []
        for value in ("0", "1"):
            providers = [("CUDAExecutionProvider", {"use_tf32": value}), "CPUExecutionProvider"]
            (found,) = ort.InferenceSession(str(path), providers=providers).run(None, feed)
            shares.append(f"{np.abs(found - reference).max() / np.abs(reference).max():.2g}")
        yield f"| {path.stem} | {' | '.join(shares)} |"


def _verdicts(folder: Path, pairs: int) -> Iterator[str]:
    yield "\n| judged on CUDA | verdicts | latency | seconds |\n|---|---|---|---|"
    for name in INPUTS:
        path = folder / f"{name}.onnx"
        shutil.copy(path, copy := folder / f"{name}.copy")
        yield _judged(f"{name} against its copy", path, copy, pairs, "--only", "latency")
        copy.unlink()
    for name in ("resnet50", "encoder"):
        for method in ("fp16", "static"):
            if (variant := folder / f"{name}-{method}.onnx").exists():
                yield _judged(f"{name} and {method}", folder / f"{name}.onnx", variant, 1)
                yield _judged(
                    f"{name} and {method}, batch 32",
                    folder / f"{name}.onnx",
                    variant,
                    1,
                    "--batch",
                    "32",
                )


def _judged(what: str, baseline: Path, candidate: Path, times: int, *options: str) -> str:
    verdicts: list[str] = []
    latencies: list[str] = []
    begun = time.perf_counter()
    for seed in range(times):
        done = _call(
            "judge",
            baseline,
            candidate,
            "--target",
            "cuda",
            "--seed",
            str(seed),
            "--json",
            *options,
        )
        try:
            document = json.loads(done.stdout)
        except json.JSONDecodeError:
            return f"| {what} | not measured | {_error(done)} |"
        verdicts.append(document["verdict"])
        results = [one for target in document["targets"] for one in target["results"]]
        latencies += [
            one["reason"].partition(" the latency")[0]
            for one in results
            if one["gate"] == "latency"
        ]
        if times == 1:
            verdicts += [f"{one['gate']} {one['metric']}: {one['verdict']}" for one in results]
    seconds = (time.perf_counter() - begun) / times
    return f"| {what} | {', '.join(verdicts)} | {'; '.join(latencies)} | {seconds:.0f} |"


def _call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onnx_ops", *map(str, arguments), "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())[:400] if done.returncode else ""


def _rows(name: str, count: int) -> Any:
    return np.random.default_rng(1).standard_normal((count, *INPUTS[name])).astype(np.float32)


def _write(name: str, path: Path) -> None:
    import torch

    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    module = {"resnet50": _resnet50, "encoder": _encoder, "mlp": _mlp}[name]().eval()
    row = torch.randn(2, *INPUTS[name])
    torch.onnx.export(
        module,
        (row,),
        str(path),
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
        dynamo=True,
        external_data=False,
        optimize=True,
        verbose=False,
    )


def _mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _encoder() -> Any:
    from torch import nn

    layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def _resnet50() -> Any:
    import torch
    from torch import nn

    def convolution(taken: int, given: int, size: int, stride: int = 1) -> Sequence[nn.Module]:
        return nn.Conv2d(taken, given, size, stride, size // 2, bias=False), nn.BatchNorm2d(given)

    class Bottleneck(nn.Module):
        def __init__(self, taken: int, width: int, stride: int) -> None:
            super().__init__()
            self.path = nn.Sequential(
                *(*convolution(taken, width, 1), nn.ReLU()),
                *(*convolution(width, width, 3, stride), nn.ReLU()),
                *convolution(width, 4 * width, 1),
            )
            same = taken == 4 * width and stride == 1
            self.short = (
                nn.Identity() if same else nn.Sequential(*convolution(taken, 4 * width, 1, stride))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.path(x) + self.short(x))

    blocks: list[nn.Module] = []
    taken = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(taken, width, stride if number == 0 else 1))
            taken = 4 * width
    return nn.Sequential(
        *(*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, 1000)),
    )


if __name__ == "__main__":
    sys.exit(main())
