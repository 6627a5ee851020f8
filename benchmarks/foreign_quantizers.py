"""Files of other quantizers through `judge` with labels: sound ones pass, planted faults fail, none stays undecided.

Eight networks are trained on the digits of scikit-learn. Each quantizer that is installed here writes its files of
them, and those that keep the task metric are sound. Planted faults are in scales, zero points, blocks and ranges; one
counts if it moves the answers by more than 1 % of their spread.

    python -m benchmarks.foreign_quantizers [--seed N] [--networks mlp,cnn] [--only ort]

Quantizers beside ONNX Runtime's are optional: Olive, neural-compressor, NNCF, ModelOpt. The table names those that are
missing. Run it with the interpreter of an environment that has them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import secrets
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_ops.cli.main import app

MAX_DROP = 0.03
"""Points of accuracy that a candidate may lose. A sound file is one that loses less than a third of it here."""

SPREAD = 0.01
"""Share of the spread of the answers by which a fault that counts moves them."""

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A trained model in a file; `calibration` and `scored` are rows of `image`, `labels` those of `scored`."""

    name: str
    path: Path
    calibration: Any
    scored: Any
    labels: Any

    def answers(self, path: Path) -> Any:
        """Return the scores that a file gives to the scored rows."""
        return _answers(path, self.scored)


def _answers(path: Path, rows: Any) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: rows})[0]


# Networks ------------------------------------------------------------------------------------------------------------


def networks(folder: Path, seed: int, names: Collection[str]) -> Iterator[Network]:
    """Train and export the networks of those names; all if there are none."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order], digits.target[order]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    for name, build in _networks().items():
        if names and name not in names:
            continue
        net = build()
        _train(net, images[:900], labels[:900])
        path = folder / name / "model.onnx"
        path.parent.mkdir()
        net.eval()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net, (torch.zeros(2, 1, 8, 8),), path, input_names=["image"], output_names=["scores"],
                dynamic_axes={"image": {0: "batch"}, "scores": {0: "batch"}}, opset_version=18, dynamo=False,
                do_constant_folding=name != "cnn-norm",
            )  # fmt: skip
        yield Network(
            name=name,
            path=path,
            calibration=images[:256],
            scored=_enlarge(images[900:], seed),
            labels=_again(labels[900:]),
        )


_TIMES = 4


def _enlarge(images: Any, seed: int) -> Any:
    """Repeat rows with a little noise, for as many rows as an interval of a third of the limit needs."""
    draw = np.random.default_rng(seed)
    copies = [np.clip(images + draw.normal(0, 0.03, images.shape), 0, 1) for _ in range(_TIMES)]
    return np.concatenate(copies).astype(np.float32)


def _again(labels: Any) -> Any:
    return np.concatenate([labels] * _TIMES)


def _networks() -> dict[str, Callable[[], Any]]:
    import torch
    from torch import nn

    class Tokens(nn.Module):
        """The rows of an image as tokens, through `body`, and their mean to the classes."""

        def __init__(self, body: Any, width: int) -> None:
            super().__init__()
            self.inner, self.body, self.head = nn.Linear(8, width), body, nn.Linear(width, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            answer = self.body(self.inner(image.flatten(1, 2)))
            return self.head((answer[0] if isinstance(answer, tuple) else answer).mean(1))

    def mlp(*sizes: int, act: Any = nn.ReLU) -> Any:
        parts: list[Any] = [nn.Flatten()]
        for before, after in zip((64, *sizes), sizes, strict=False):
            parts += [nn.Linear(before, after), act()]
        return nn.Sequential(*parts, nn.Linear(sizes[-1], 10))

    def block(before: int, after: int, *, norm: bool) -> list[Any]:
        return [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(*block(1, 16, norm=True))
            self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1), nn.ReLU())
            self.head = nn.Linear(16 * 16, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            held = self.first(image)
            return self.head(nn.functional.max_pool2d(held + self.deep(held), 2).flatten(1))

    tail = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4, 10)]
    return {
        "mlp": lambda: mlp(96, 64),
        "cnn": lambda: nn.Sequential(*block(1, 16, norm=False), nn.MaxPool2d(2), *block(16, 32, norm=False), *tail),
        "cnn-norm": lambda: nn.Sequential(*block(1, 16, norm=True), nn.MaxPool2d(2), *block(16, 32, norm=True), *tail),
        "mlp-gelu": lambda: mlp(128, 128, 64, act=nn.GELU),
        "residual": Residual,
        "encoder": lambda: Tokens(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), 2), 64
        ),
        "lstm": lambda: Tokens(nn.LSTM(32, 64, batch_first=True), 32),
        "mixer": lambda: Tokens(
            nn.Sequential(nn.Conv1d(8, 32, 1), nn.ReLU(), nn.Conv1d(32, 8, 1), nn.LayerNorm(64), nn.Linear(64, 64)), 64
        ),
    }


def _train(net: Any, images: Any, labels: Any) -> None:
    import torch

    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    taken, wanted = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(40):
        for part in torch.randperm(len(taken)).split(64):
            optimizer.zero_grad()
            noisy = taken[part] + 0.05 * torch.randn_like(taken[part])
            torch.nn.functional.cross_entropy(net(noisy), wanted[part]).backward()
            optimizer.step()


# Quantizers ----------------------------------------------------------------------------------------------------------

Quantize = Callable[[Network, Path], object]
_QUANTIZERS: dict[str, Quantize] = {}


def _quantizer(name: str) -> Callable[[Quantize], Quantize]:
    def add(quantize: Quantize) -> Quantize:
        _QUANTIZERS[name] = quantize
        return quantize

    return add


class _Reader:
    def __init__(self, rows: Any) -> None:
        self.rows = iter([{"image": part} for part in np.array_split(rows, 16)])

    def get_next(self) -> Any:
        return next(self.rows, None)

    def __iter__(self) -> Any:
        return self.rows

    def rewind(self) -> None:
        """Nothing: one pass is enough."""


def _prepared(network: Network) -> Path:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    path = network.path.with_name("prepared.onnx")
    if not path.exists():
        quant_pre_process(str(network.path), str(path), skip_symbolic_shape=True)
    return path


def _ort_static(**how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        from onnxruntime import quantization as q

        types = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8, **how}
        q.quantize_static(str(_prepared(network)), str(path), _Reader(network.calibration), **types)

    return quantize


def _ort_static_kinds() -> None:
    from onnxruntime import quantization as q

    pair, whole = q.QuantFormat.QDQ, q.QuantFormat.QOperator
    _QUANTIZERS["ort qdq"] = _ort_static(quant_format=pair)
    _QUANTIZERS["ort qdq per-channel"] = _ort_static(quant_format=pair, per_channel=True)
    _QUANTIZERS["ort qdq uint8 weights"] = _ort_static(quant_format=pair, weight_type=q.QuantType.QUInt8)
    _QUANTIZERS["ort qdq int4 weights"] = _ort_static(
        quant_format=pair, per_channel=True, weight_type=q.QuantType.QInt4, op_types_to_quantize=["MatMul", "Gemm"]
    )
    _QUANTIZERS["ort qoperator"] = _ort_static(quant_format=whole)
    _QUANTIZERS["ort qoperator per-channel"] = _ort_static(quant_format=whole, per_channel=True)


def _ort_dynamic(**how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        plain = _prepared(network)
        model = onnx.load(plain)
        del model.graph.value_info[:]
        onnx.save(model, plain)
        quantize_dynamic(str(plain), str(path), **how)

    return quantize


_QUANTIZERS["ort dynamic"] = _ort_dynamic()
_QUANTIZERS["ort dynamic per-channel"] = _ort_dynamic(per_channel=True)


@_quantizer("ort dynamic, optimized")
def _ort_dynamic_optimized(network: Network, path: Path) -> None:
    """As the runtime fuses it: DynamicQuantizeMatMul, MatMulIntegerToFloat."""
    import onnxruntime as ort

    before = path.with_name("before.onnx")
    _ort_dynamic()(network, before)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(str(before), options, providers=["CPUExecutionProvider"])


def _ort_blocks(bits: int, block: int, *, symmetric: bool, pairs: bool = False, algorithm: str = "") -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits
        from onnxruntime.quantization.quant_utils import QuantFormat

        form = QuantFormat.QDQ if pairs else QuantFormat.QOperator
        how = None
        if algorithm == "hqq":
            how = nbits.HQQWeightOnlyQuantConfig(block_size=block, bits=bits)
        elif algorithm == "rtn":
            how = nbits.RTNWeightOnlyQuantConfig()
        model = onnx.load(_without_gemms(network))
        quantizer = nbits.MatMulNBitsQuantizer(
            model, bits=bits, block_size=block, is_symmetric=symmetric, quant_format=form, algo_config=how
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))

    return quantize


def _without_gemms(network: Network) -> Path:
    """The model with MatMul and Add for each Gemm, which block quantizers leave out."""
    from onnx_ops.onnx_graph.rewrites import split_gemms

    path = network.path.with_name("split.onnx")
    if not path.exists():
        model = onnx.load(network.path)
        split_gemms(model)
        onnx.save(model, path)
    return path


_QUANTIZERS["ort 4-bit blocks"] = _ort_blocks(4, 16, symmetric=True)
_QUANTIZERS["ort 4-bit blocks, zero points"] = _ort_blocks(4, 32, symmetric=False)
_QUANTIZERS["ort 8-bit blocks"] = _ort_blocks(8, 32, symmetric=True)
_QUANTIZERS["ort 4-bit blocks, pairs"] = _ort_blocks(4, 16, symmetric=True, pairs=True)
_QUANTIZERS["ort 4-bit blocks, pairs, zero points"] = _ort_blocks(4, 16, symmetric=False, pairs=True)
_QUANTIZERS["ort 4-bit blocks, HQQ"] = _ort_blocks(4, 16, symmetric=False, algorithm="hqq")


@_quantizer("ort float16, keep")
def _ort_half(network: Network, path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(network.path), keep_io_types=True), path)


@_quantizer("ort float16, partly")
def _ort_partly_half(network: Network, path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(network.path)
    kept = [node.name for node in model.graph.node if node.op_type in ("Gemm", "Conv", "MatMul")][:-1]
    onnx.save(convert_float_to_float16(model, keep_io_types=True, node_block_list=kept), path)


def _by_hand(bits: int, *, unsigned: bool, block: int, swap: bool) -> Quantize:
    """Weights behind DequantizeLinear nodes with names that say nothing, some of them transposed."""

    def quantize(network: Network, path: Path) -> None:
        model = onnx.load(network.path)
        for opset in model.opset_import:
            opset.version = max(opset.version, 21) if opset.domain == "" else opset.version
        model.ir_version = max(model.ir_version, 10)
        count = 0
        for node in list(model.graph.node):
            stored = {tensor.name: tensor for tensor in model.graph.initializer}
            if node.op_type not in ("Gemm", "MatMul", "Conv") or node.input[1] not in stored:
                continue
            weight = numpy_helper.to_array(stored[node.input[1]])
            axis = 0 if node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute) else 1
            turned = swap and weight.ndim == 2
            written = weight.T if turned else weight
            along = (1 - axis if block else axis) if not turned else (axis if block else 1 - axis)
            if weight.ndim > 2 and block:
                continue
            nodes, tensors = _dequantizing(written, f"k{count}", bits, unsigned=unsigned, block=block, axis=along)
            if turned:
                nodes.append(helper.make_node("Transpose", [f"k{count}_f"], [f"k{count}_t"], perm=[1, 0]))
            node.input[1] = nodes[-1].output[0]
            model.graph.initializer.extend(tensors)
            place = list(model.graph.node).index(node)
            for made in reversed(nodes):
                model.graph.node.insert(place, made)
            count += 1
        used = {name for node in model.graph.node for name in node.input}
        left = [tensor for tensor in model.graph.initializer if tensor.name in used]
        del model.graph.initializer[:]
        model.graph.initializer.extend(left)
        onnx.save(model, path)

    return quantize


def _dequantizing(
    weight: Any, name: str, bits: int, *, unsigned: bool, block: int, axis: int
) -> tuple[list[Any], list[Any]]:
    """Nodes and constants for a weight that is rounded by entry of an axis, or by block along it."""
    most = (1 << bits) - 1 if unsigned else (1 << (bits - 1)) - 1
    least = 0 if unsigned else -most
    size = weight.shape[axis]
    block = min(block, size)
    groups = np.arange(size) // block if block else np.arange(size)
    count = groups.max() + 1
    moved = np.moveaxis(weight, axis, 0)
    scales, zeros = [], []
    for group in range(count):
        part = moved[groups == group].reshape((groups == group).sum(), -1)
        part = part if block else part.reshape(1, -1).T  # by block: one scale for each column
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        scale = (high - low) / most if unsigned else np.maximum(high, -low) / most
        scales.append(np.maximum(scale, 1e-8))
        zeros.append(np.clip(np.rint(-low / scales[-1]), 0, most) if unsigned else np.zeros_like(low))
    scale, zero = np.stack(scales), np.stack(zeros)
    shape = (count, *moved.shape[1:]) if block else (count, *(1,) * (weight.ndim - 1))
    scale, zero = scale.reshape(shape).astype(np.float32), zero.reshape(shape)
    wide = [part[groups] for part in (scale, zero)]
    levels = np.clip(np.rint(moved / wide[0]) + wide[1], least, most)
    kind = getattr(onnx.TensorProto, f"{'U' if unsigned else ''}INT{bits}")
    parts = {"q": np.moveaxis(levels, 0, axis), "z": np.moveaxis(zero, 0, axis)}
    if not block:
        parts["z"] = parts["z"].reshape(-1)
    tensors = [
        helper.make_tensor(f"{name}_{end}", kind, part.shape, part.astype(int).reshape(-1).tolist())
        for end, part in parts.items()
    ]
    scale = np.moveaxis(scale, 0, axis)
    tensors.append(numpy_helper.from_array(np.ascontiguousarray(scale if block else scale.reshape(-1)), f"{name}_s"))
    node = helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [f"{name}_f"], axis=axis)
    if block:
        node.attribute.append(helper.make_attribute("block_size", block))
    return [node], tensors


_QUANTIZERS["by hand int8"] = _by_hand(8, unsigned=False, block=0, swap=True)
_QUANTIZERS["by hand uint8, blocks"] = _by_hand(8, unsigned=True, block=16, swap=False)
_QUANTIZERS["by hand int4, blocks"] = _by_hand(4, unsigned=False, block=16, swap=False)
_QUANTIZERS["by hand uint4, blocks, transposed"] = _by_hand(4, unsigned=True, block=16, swap=True)


def _olive(kind: str, **how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        workflow = importlib.import_module("olive.workflows")
        folder = path.parent / "olive"
        np.savez(path.parent / "rows.npz", image=network.calibration)
        config = {
            "input_model": {"type": "ONNXModel", "model_path": str(network.path)},
            "systems": {"here": {"type": "LocalSystem", "accelerators": [
                {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]}},
            "host": "here", "target": "here", "no_artifacts": False,
            "passes": {"quantize": {"type": kind, **how}},
            "cache_dir": str(path.parent / "cache"), "output_dir": str(folder),
        }  # fmt: skip
        if how.get("data_config"):
            config["data_configs"] = [_olive_rows(path.parent / "rows.npz")]
        workflow.run(config)
        found = next(iter(sorted(folder.rglob("*.onnx"))))
        model = onnx.load(found)
        onnx.save(model, path)

    return quantize


def _olive_rows(path: Path) -> dict[str, Any]:
    """Olive's own description of rows in a file; its loader is registered by the script beside it."""
    script = path.with_name("olive_rows.py")
    script.write_text(
        "import numpy as np\n"
        "from olive.data.registry import Registry\n"
        "class Rows:\n"
        "    def __init__(self, path):\n        self.rows = np.load(path)['image']\n"
        "    def __len__(self):\n        return len(self.rows)\n"
        "    def __getitem__(self, index):\n        return {'image': self.rows[index]}, 0\n"
        "@Registry.register_dataset()\n"
        f"def digits_rows(**_):\n    return Rows({str(path)!r})\n"
    )
    return {
        "name": "rows", "type": "DataContainer", "user_script": str(script),
        "load_dataset_config": {"type": "digits_rows"}, "dataloader_config": {"batch_size": 16},
    }  # fmt: skip


_QUANTIZERS["olive dynamic"] = _olive("OnnxDynamicQuantization")
_QUANTIZERS["olive static"] = _olive("OnnxStaticQuantization", data_config="rows", quant_format="QDQ")
_QUANTIZERS["olive 4-bit blocks"] = _olive("OnnxBlockWiseRtnQuantization", block_size=16, is_symmetric=True)
_QUANTIZERS["olive float16"] = _olive("OnnxFloatToFloat16", keep_io_types=True)


@_quantizer("nncf int8")
def _nncf(network: Network, path: Path) -> None:
    nncf = importlib.import_module("nncf")
    rows = nncf.Dataset([{"image": part} for part in np.array_split(network.calibration, 16)])
    onnx.save(nncf.quantize(onnx.load(network.path), rows, subset_size=16), path)


@_quantizer("nncf weights int8")
def _nncf_weights(network: Network, path: Path) -> None:
    nncf = importlib.import_module("nncf")
    model = onnx.load(network.path)
    for opset in model.opset_import:
        opset.version = max(opset.version, 21) if opset.domain == "" else opset.version
    onnx.save(nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM), path)


@_quantizer("nncf weights int4")
def _nncf_int4(network: Network, path: Path) -> None:
    nncf = importlib.import_module("nncf")
    model = onnx.load(network.path)
    for opset in model.opset_import:
        opset.version = max(opset.version, 21) if opset.domain == "" else opset.version
    mode = nncf.CompressWeightsMode.INT4_SYM
    onnx.save(nncf.compress_weights(model, mode=mode, group_size=16, all_layers=True), path)


def _inc(approach: str, form: str) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        inc = importlib.import_module("neural_compressor")
        library = importlib.import_module("neural_compressor.quantization")

        class Rows:
            batch_size = 16

            def __iter__(self) -> Any:
                for part in np.array_split(network.calibration, 16):
                    yield {"image": part}, 0

        config = inc.PostTrainingQuantConfig(approach=approach, quant_format=form)
        made = library.fit(str(_prepared(network)), config, calib_dataloader=Rows())
        made.save(str(path))

    return quantize


_QUANTIZERS["inc static, pairs"] = _inc("static", "QDQ")
_QUANTIZERS["inc static, operators"] = _inc("static", "default")
_QUANTIZERS["inc dynamic"] = _inc("dynamic", "default")


def _modelopt(**how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        library = importlib.import_module("modelopt.onnx.quantization")
        library.quantize(
            str(network.path), calibration_data={"image": network.calibration}, output_path=str(path),
            calibration_eps=["cpu"], log_level="ERROR", **how,
        )  # fmt: skip

    return quantize


_QUANTIZERS["modelopt int8"] = _modelopt(quantize_mode="int8")
_QUANTIZERS["modelopt int4"] = _modelopt(quantize_mode="int4", calibration_method="rtn_dq", block_size=16)


# Planted faults ------------------------------------------------------------------------------------------------------


def faults(path: Path) -> Iterator[tuple[str, Path]]:
    """Write copies of a quantized file with one planted fault each."""
    model = onnx.load(path)
    for name, plant in _FAULTS.items():
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        if plant(copy):
            file = path.with_name(f"fault-{name.replace(' ', '-')}.onnx")
            onnx.save(copy, file)
            yield name, file


_PLACES = {
    "DequantizeLinear": (0, 1, 2), "MatMulInteger": (1, -1, 3), "QLinearMatMul": (3, 4, 5), "QLinearConv": (3, 4, 5),
    "QGemm": (3, 4, 5), "MatMulNBits": (1, 2, 3), "ConvInteger": (1, -1, 3), "DynamicQuantizeMatMul": (1, 2, 3),
    "MatMulIntegerToFloat": (1, 3, 5), "DynamicQuantizeLSTM": (1, 8, 9),
}  # fmt: skip
"""Where a node has its weight, scale and zero point; -1: a constant of another node."""


def _largest_weight(model: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the node with the largest quantized weight, and the constants of the model."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    stored |= {
        n.output[0]: n.attribute[0].t
        for n in model.graph.node
        if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    sizes = [
        (int(np.prod(stored[node.input[_PLACES[node.op_type][0]]].dims)), index)
        for index, node in enumerate(model.graph.node)
        if node.op_type in _PLACES and len(node.input) > 1 and node.input[_PLACES[node.op_type][0]] in stored
    ]
    return (model.graph.node[max(sizes)[1]], stored) if sizes else None


def _rewrite(tensor: Any, values: Any) -> None:
    """Put other values of the same type into a constant."""
    limits = {"int4": (-8, 7), "uint4": (0, 15)}
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    if kind in limits:
        flat = np.clip(np.asarray(values).astype(int), *limits[kind]).reshape(-1).tolist()
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, flat))
        return
    before = numpy_helper.to_array(tensor)
    after = np.ascontiguousarray(np.asarray(values).astype(before.dtype).reshape(before.shape))
    tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))


def _parts(model: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return the node, and its weight, scale and zero point."""
    found = _largest_weight(model)
    if found is None:
        return None
    node, stored = found
    weight, scale, zero = _PLACES[node.op_type]
    names = [*node.input, *[""] * 10]
    scale_name = f"{names[weight].removesuffix('_quantized')}_scale" if scale < 0 else names[scale]
    return node, stored[names[weight]], stored.get(scale_name), stored.get(names[zero])


def _swap_scales(model: Any) -> bool:
    """Exchange the least and the largest scale of a weight; a single one is doubled."""
    found = _parts(model)
    if found is None or found[2] is None:
        return False
    scale = numpy_helper.to_array(found[2]).copy()
    flat = scale.reshape(-1)
    least, most = flat.argmin(), flat.argmax()
    if flat.size > 1:
        flat[[least, most]] = flat[[most, least]]
    else:
        flat *= 2
    _rewrite(found[2], scale)
    return True


def _move_zero(model: Any) -> bool:
    """Move the zero point of a weight, by an eighth of the levels."""
    found = _parts(model)
    if found is None or found[3] is None:
        return False
    zero = numpy_helper.to_array(found[3])
    kind = onnx.TensorProto.DataType.Name(found[3].data_type).lower()
    if found[0].op_type == "MatMulNBits":
        _rewrite(found[3], zero + 2 if zero.dtype.kind == "f" else zero ^ 0x22)
        return True
    step = 2 if "4" in kind else 16
    middle = 0 if kind.startswith("i") else (8 if "4" in kind else 128)
    moved = zero.astype(int)
    _rewrite(found[3], np.where(moved > middle, moved - step, moved + step))
    return True


def _shift_blocks(model: Any) -> bool:
    """Shift the scales by one block, or by one channel."""
    found = _parts(model)
    if found is None or found[2] is None:
        return False
    scale = numpy_helper.to_array(found[2])
    if scale.size < 2:
        return False
    axis = next((axis for axis, size in enumerate(scale.shape) if size > 1), 0)
    _rewrite(found[2], np.roll(scale, 1, axis=axis))
    return True


def _shift_levels(model: Any) -> bool:
    """Shift the rows of the stored levels by one."""
    found = _parts(model)
    if found is None or len(found[1].dims) < 2:
        return False
    levels = numpy_helper.to_array(found[1])
    _rewrite(found[1], np.roll(levels, 1, axis=0))
    return True


def _truncate(model: Any) -> bool:
    """Cut the levels off at half of their range."""
    found = _parts(model)
    if found is None:
        return False
    levels = numpy_helper.to_array(found[1])
    if found[0].op_type in ("MatMulNBits", "MatMulBnb4") and any(
        a.name == "bits" and a.i == 4 for a in found[0].attribute
    ):
        low, high = np.clip(levels & 15, 5, 11), np.clip(levels >> 4, 5, 11)
        _rewrite(found[1], low | (high << 4))
        return True
    if levels.dtype.kind == "f":
        return False
    values = levels.astype(int)
    middle = (values.max() + values.min()) / 2
    half = (values.max() - values.min()) / 4
    _rewrite(found[1], np.clip(values, round(middle - half), round(middle + half)))
    return True


_FAULTS: dict[str, Callable[[Any], bool]] = {
    "swapped scale": _swap_scales,
    "wrong zero point": _move_zero,
    "shifted scales": _shift_blocks,
    "shifted levels": _shift_levels,
    "truncated range": _truncate,
}


# The run -------------------------------------------------------------------------------------------------------------

_VERDICTS = {0: "PASS", 1: "FAIL", 2: "refused", 3: "INCONCLUSIVE", 4: "ERROR", 5: "refused"}


def judge(network: Network, candidate: Path, rows: Path) -> tuple[str, str]:
    """Return the verdict and the first lines of the output of `onnx-ops judge`."""
    out = io.StringIO()
    command = [
        "judge", str(network.path), str(candidate), "--data", str(rows), "--labels", "y", "--only", "parity",
        "--max-drop", f"{100 * MAX_DROP:g}%", "--quiet",
    ]  # fmt: skip
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            app(command, standalone_mode=True)
        except SystemExit as end:
            return _VERDICTS[int(end.code or 0)], out.getvalue()
    return "PASS", out.getvalue()


def main() -> int:
    """Run the table; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 20))
    parser.add_argument("--networks", default="", help="Names, with commas; default: all eight.")
    parser.add_argument("--only", default="", help="Names of quantizers that begin with this.")
    parser.add_argument("--keep", type=Path, help="Folder for the files.")
    parser.add_argument("--verbose", action="store_true", help="Show the output of each wrong verdict.")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"seed {options.seed}", flush=True)
    _ort_static_kinds()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        return _run(folder, options)


def _run(folder: Path, options: argparse.Namespace) -> int:
    sound: dict[str, Counter[str]] = defaultdict(Counter)
    planted: dict[str, Counter[str]] = defaultdict(Counter)
    missing: dict[str, str] = {}
    lossy = 0
    for network in networks(folder, options.seed, tuple(filter(None, options.networks.split(",")))):
        rows = network.path.with_name("rows.npz")
        np.savez(rows, image=network.scored, y=network.labels)
        exact = network.answers(network.path)
        right = (exact.argmax(1) == network.labels).mean()
        for name, quantize in _QUANTIZERS.items():
            if not name.startswith(options.only):
                continue
            path = network.path.parent / name.replace(" ", "-").replace(",", "") / "model.onnx"
            path.parent.mkdir()
            if problem := _attempt(quantize, network, path):
                missing[name] = problem
                continue
            given = network.answers(path)
            if right - (given.argmax(1) == network.labels).mean() > MAX_DROP / 3:
                lossy += 1
                continue
            verdict, text = judge(network, path, rows)
            sound[name][verdict] += 1
            if verdict != "PASS":
                _show(f"{network.name}, {name}: {verdict}", text, options.verbose)
            for fault, copy in faults(path):
                with contextlib.suppress(Exception):
                    moved = np.abs(network.answers(copy) - given).max() / given.std()
                    if moved <= SPREAD:
                        continue
                    verdict, text = judge(network, copy, rows)
                    planted[fault][verdict] += 1
                    if verdict != "FAIL":
                        _show(f"{network.name}, {name}, {fault}: {verdict}, moved {moved:.2g}", text, options.verbose)
        judged = sum(counts.total() for counts in (*sound.values(), *planted.values()))
        print(f"{network.name}: {judged} files judged so far", flush=True)
    return _table(sound, planted, missing, lossy)


def _attempt(quantize: Quantize, network: Network, path: Path) -> str:
    """Write a file; return why that failed."""
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            quantize(network, path)
            network.answers(path)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return "" if path.exists() else "it wrote no file"


def _show(line: str, text: str, verbose: bool) -> None:
    print(f"! {line}" + (f"\n{text}" if verbose else ""), flush=True)


def _table(
    sound: Mapping[str, Counter[str]], planted: Mapping[str, Counter[str]], missing: Mapping[str, str], lossy: int
) -> int:
    shares = []
    for title, rows, wanted in (("sound files", sound, "PASS"), ("planted faults", planted, "FAIL")):
        print(f"\n{title}")
        total: Counter[str] = Counter()
        for name, verdicts in rows.items():
            print(f"  {name:40}", ", ".join(f"{verdict} {count}" for verdict, count in verdicts.items()))
            total += verdicts
        share = total[wanted] / max(1, total.total())
        shares.append(share)
        print(f"  {'all':40}", ", ".join(f"{k} {n}" for k, n in total.items()), f"({100 * share:.1f} % {wanted})")
    print(f"\n{lossy} files lost more than a third of the limit and are left out")
    for name, why in missing.items():
        print(f"  not had: {name}: {why}")
    return int(shares[0] < 0.98 or shares[1] < 0.97)


if __name__ == "__main__":
    sys.exit(main())
