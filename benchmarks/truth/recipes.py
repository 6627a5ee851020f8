"""Small trained models, and recipes by which tools make sound int8 variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.truth.families import CLASSES, TOKENS, Cnn, Mlp, Transformer, trained
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.optimizers.library import BatchReader, suppress_output
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import AS_WRITTEN
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.instrumentation import write_with_outputs
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import flatten_biases
from onnx_ops.ports import ExportRequest

CALIBRATION = 256
"""Number of rows from which ranges are calibrated."""

TRAINING, COPIES = 1200, 5
"""Rows to train on, and copies of the other rows.

The copies have small noise, and are scored.
"""

_OPSET = 21
"""The first opset in which QuantizeLinear takes 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A float export with rows of its training set, and labelled rows.

    The first rows of the training set are used for calibration.
    """

    name: str
    path: Path
    feed: str
    rows: Any
    scored: Any
    labels: Any

    @property
    def calibration(self) -> dict[str, Any]:
        return {self.feed: self.rows[:CALIBRATION]}

    @property
    def unseen(self) -> dict[str, Any]:
        return {self.feed: self.rows[CALIBRATION : 2 * CALIBRATION]}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 16, 3, padding=1)
        self.one, self.two = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(image))
        x = torch.relu(x + self.two(torch.relu(self.one(x))))
        scores: torch.Tensor = self.last(torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


class Depthwise(nn.Module):
    """Depthwise convolutions with activations cut off at 6, as in mobile nets."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 24, 3, padding=1)
        self.spread = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.mix, self.last = nn.Conv2d(24, 32, 1), nn.Linear(32 * 16, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = nn.functional.hardswish(self.enter(image))
        x = nn.functional.relu6(self.mix(nn.functional.relu6(self.spread(x))))
        scores: torch.Tensor = self.last(torch.max_pool2d(x, 2).flatten(1))
        return scores


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.enter, self.cell, self.last = (
            nn.Linear(8, 24),
            kind(24, 32, batch_first=True),
            nn.Linear(32, CLASSES),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(torch.relu(self.enter(tokens)))
        scores: torch.Tensor = self.last(states[:, -1])
        return scores


class Mixer(nn.Module):
    """Branches of different sizes that meet in one tensor, GELU and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 24), nn.Linear(64, 40)
        self.norm, self.up, self.last = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([torch.sigmoid(self.left(x)), 3 * torch.tanh(self.right(x))], dim=1)
        scores: torch.Tensor = self.last(nn.functional.gelu(self.up(self.norm(y + x))))
        return scores


_IMAGE, _FLAT, _ROWS = ("image", (1, 8, 8)), ("x", (64,)), ("tokens", (TOKENS, 8))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, tuple[int, ...]]]] = {
    "mlp": (Mlp, _FLAT),
    "cnn": (Cnn, _IMAGE),
    "attention": (Transformer, _ROWS),
    "residual": (Residual, _IMAGE),
    "depthwise": (Depthwise, _IMAGE),
    "mixer": (Mixer, _FLAT),
    "heavy tails": (Mlp, _FLAT),
    "gru": (lambda: Recurrent(nn.GRU), _ROWS),
    "lstm": (lambda: Recurrent(nn.LSTM), _ROWS),
}


def make(name: str, folder: Path, seed: int) -> Trained:
    """Return one of `MODELS`, trained on digits."""
    kind, (feed, shape) = MODELS[name]
    features, labels = load_digits(return_X_y=True)
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(features))
    rows, known = (features[order] / 16).astype(np.float32), labels[order]
    if name == "heavy tails":
        rows = (rows * np.exp(0.5 * draw.standard_normal((len(rows), 1)))).astype(np.float32)
    # The rows for calibration have the same noise as the scored rows. Ranges of clean rows would
    # clip the noise.
    parts = rows[:TRAINING], np.concatenate([rows[TRAINING:]] * COPIES)
    noisy = [(part + draw.normal(0, 0.05, part.shape)).astype(np.float32) for part in parts]
    rows, held_out = (_shaped(part, shape) for part in noisy)
    torch.manual_seed(seed)
    module = trained(kind(), torch.from_numpy(rows), torch.from_numpy(known[:TRAINING]), steps=80)
    path = folder / f"{name.replace(' ', '-')}-{seed}.onnx"
    section = Export(framework="torch", opset=_OPSET, dynamic={feed: {0: "batch"}})
    TorchExporter().export(module, ExportRequest(section=section, samples={feed: rows}, path=path))
    return Trained(
        name=f"{name} {seed}",
        path=path,
        feed=feed,
        rows=rows,
        scored=held_out,
        labels=np.concatenate([known[TRAINING:]] * COPIES),
    )


def _shaped(rows: Any, shape: tuple[int, ...]) -> Any:
    """Shape rows of pixels as tokens, as an image, or flat.

    Tokens are eight rows of eight pixels, followed by empty ones.
    """
    if shape[0] == TOKENS:
        return np.pad(rows.reshape(-1, 8, 8), ((0, 0), (0, TOKENS - 8), (0, 0)))
    return rows.reshape(-1, *shape)


def variants(model: Trained, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a file of every recipe that has an effect on the model."""
    prepared = _prepared(model, folder)
    for name, recipe in RECIPES.items():
        path = folder / f"{model.path.stem}.{name.replace(' ', '-')}.onnx"
        with suppress_output():
            recipe(model, prepared, path)
        if any(tensor.name.endswith("_quantized") for tensor in read_model(path).graph.initializer):
            yield name, path


def _prepared(model: Trained, folder: Path) -> Path:
    """Write the model with shapes, which the quantizers need.

    The weights are those of the source.
    """
    source = read_model(model.path)
    del source.graph.value_info[:]
    plain, path = folder / "plain.onnx", folder / f"{model.path.stem}.prepared.onnx"
    write_model(source, plain)
    quant_pre_process(str(plain), str(path), skip_optimization=True, skip_symbolic_shape=True)
    prepared = read_model(path)
    flatten_biases(prepared)
    write_model(prepared, path)
    return path


Recipe = Callable[[Trained, Path, Path], None]


def _static(**changes: Any) -> Recipe:
    extra: Mapping[str, Any] = changes.pop("extra", {})
    settings: dict[str, Any] = {
        "quant_format": QuantFormat.QDQ,
        "per_channel": True,
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QInt8,
        "extra_options": {"DefaultTensorType": 1, **extra},
        **changes,
    }

    def make_it(model: Trained, prepared: Path, path: Path) -> None:
        reader = BatchReader(model.calibration, read_model_info(prepared))
        quantize_static(str(prepared), str(path), reader, **settings)

    return make_it


def _dynamic(model: Trained, prepared: Path, path: Path) -> None:
    quantize_dynamic(
        str(prepared), str(path), per_channel=True, weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": 1},
    )  # fmt: skip


def _gptq(model: Trained, prepared: Path, path: Path) -> None:
    """Quantize per channel, then round each matrix of a product by columns.

    Later columns compensate for the errors of earlier ones.
    """
    _static()(model, prepared, path)
    source, derived = read_model(model.path), read_model(path)
    tensors = {tensor.name: tensor for tensor in derived.graph.initializer}
    floats = {tensor.name: numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    for node in source.graph.node:
        stored = tensors.get(f"{node.input[1]}_quantized") if len(node.input) > 1 else None
        if stored is None or node.op_type not in ("Gemm", "MatMul") or len(stored.dims) != 2:
            continue
        turned = node.op_type == "MatMul" or not any(
            a.name == "transB" and a.i for a in node.attribute
        )
        weight = floats[node.input[1]].astype(np.float64)
        weight = weight.T if turned else weight
        scale = (
            numpy_helper.to_array(tensors[f"{node.input[1]}_scale"])
            .astype(np.float64)
            .reshape(-1, 1)
        )
        rounded = gptq(weight / scale, _inputs(model, node.input[0]).reshape(-1, weight.shape[1]))
        levels = (rounded.T if turned else rounded).astype(np.int8)
        stored.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(levels), stored.name))
    write_model(derived, path)


def gptq(steps: Any, inputs: Any) -> Any:
    """Return the levels (outputs, inputs) of a weight that is given in steps.

    Frantar et al. 2023, arXiv:2210.17323, algorithm 1.
    """
    hessian = inputs.astype(np.float64).T @ inputs
    damped = hessian + np.eye(len(hessian)) * max(0.01 * float(np.diag(hessian).mean()), 1e-9)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, levels = steps.copy(), np.empty_like(steps)
    for column in range(steps.shape[1]):
        levels[:, column] = np.clip(np.rint(left[:, column]), -127, 127)
        wrong = (left[:, column] - levels[:, column]) / upper[column, column]
        left[:, column + 1 :] -= np.outer(wrong, upper[column, column + 1 :])
    return levels


def _inputs(model: Trained, name: str) -> Any:
    if name == model.feed:
        return model.calibration[name]
    copy = model.path.with_name("inside.onnx")
    write_with_outputs(model.path, [name], copy)
    answer: Any = OnnxRuntime().run(copy, AS_WRITTEN, (model.calibration,))[0][name]
    return answer


RECIPES: dict[str, Recipe] = {
    "per channel": _static(),
    "per tensor": _static(per_channel=False),
    "entropy": _static(calibrate_method=CalibrationMethod.Entropy),
    "percentile 99.999": _static(calibrate_method=CalibrationMethod.Percentile),
    "percentile 99.99": _static(
        calibrate_method=CalibrationMethod.Percentile, extra={"CalibPercentile": 99.99}
    ),
    "percentile 99.9": _static(
        calibrate_method=CalibrationMethod.Percentile, extra={"CalibPercentile": 99.9}
    ),
    "symmetric": _static(extra={"ActivationSymmetric": True}),
    "S8S8": _static(activation_type=QuantType.QInt8),
    "reduced range": _static(reduce_range=True),
    "moving average": _static(extra={"CalibMovingAverage": True}),
    "uint8 weights": _static(weight_type=QuantType.QUInt8, per_channel=False),
    "16 bits": _static(activation_type=QuantType.QUInt16),
    "QOperator": _static(quant_format=QuantFormat.QOperator),
    "QOperator per tensor": _static(quant_format=QuantFormat.QOperator, per_channel=False),
    "GPTQ-like": _gptq,
    "dynamic": _dynamic,
}
