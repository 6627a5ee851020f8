"""The quantizers whose files are judged: ONNX Runtime's, by hand, and others where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.quantizer_networks import Network

Quantize = Callable[[Network, Path], object]
QUANTIZERS: dict[str, Quantize] = {}


def _quantizer(name: str) -> Callable[[Quantize], Quantize]:
    def add(quantize: Quantize) -> Quantize:
        QUANTIZERS[name] = quantize
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


def _ort_static(form: str, *, weights: str = "QInt8", **how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        from onnxruntime import quantization as q

        q.quantize_static(
            str(_prepared(network)), str(path), _Reader(network.calibration), quant_format=q.QuantFormat[form],
            activation_type=q.QuantType.QUInt8, weight_type=q.QuantType[weights], **how,
        )  # fmt: skip

    return quantize


QUANTIZERS["ort qdq"] = _ort_static("QDQ")
QUANTIZERS["ort qdq per-channel"] = _ort_static("QDQ", per_channel=True)
QUANTIZERS["ort qdq uint8 weights"] = _ort_static("QDQ", weights="QUInt8")
QUANTIZERS["ort qdq int4 weights"] = _ort_static(
    "QDQ", weights="QInt4", per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
)
QUANTIZERS["ort qoperator"] = _ort_static("QOperator")
QUANTIZERS["ort qoperator per-channel"] = _ort_static("QOperator", per_channel=True)


def _ort_dynamic(**how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        plain = _prepared(network)
        model = onnx.load(plain)
        del model.graph.value_info[:]
        onnx.save(model, plain)
        quantize_dynamic(str(plain), str(path), **how)

    return quantize


QUANTIZERS["ort dynamic"] = _ort_dynamic()
QUANTIZERS["ort dynamic per-channel"] = _ort_dynamic(per_channel=True)


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
        elif algorithm == "k-quant":
            how = nbits.KQuantWeightOnlyQuantConfig()
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


QUANTIZERS["ort 4-bit blocks"] = _ort_blocks(4, 16, symmetric=True)
QUANTIZERS["ort 4-bit blocks, zero points"] = _ort_blocks(4, 32, symmetric=False)
QUANTIZERS["ort 8-bit blocks"] = _ort_blocks(8, 32, symmetric=True)
QUANTIZERS["ort 4-bit blocks, pairs"] = _ort_blocks(4, 16, symmetric=True, pairs=True)
QUANTIZERS["ort 4-bit blocks, pairs, zero points"] = _ort_blocks(4, 16, symmetric=False, pairs=True)
QUANTIZERS["ort 4-bit blocks, HQQ"] = _ort_blocks(4, 16, symmetric=False, algorithm="hqq")
QUANTIZERS["ort 4-bit blocks, k-quant"] = _ort_blocks(4, 32, symmetric=False, algorithm="k-quant")


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
        stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        count = 0
        for node in list(model.graph.node):
            if node.op_type not in ("Gemm", "MatMul", "Conv") or node.input[1] not in stored:
                continue
            weight = stored[node.input[1]]
            if weight.ndim > 2 and block:
                continue
            turned = swap and weight.ndim == 2
            written = weight.T if turned else weight
            axis = _rounded_axis(node, turned=turned, by_block=bool(block))
            nodes, tensors = _dequantizing(written, f"k{count}", bits, unsigned=unsigned, block=block, axis=axis)
            if turned:
                nodes.append(helper.make_node("Transpose", [f"k{count}_f"], [f"k{count}_t"], perm=[1, 0]))
            _replace_weight(model, node, nodes, tensors)
            count += 1
        _remove_unused(model)
        onnx.save(model, path)

    return quantize


def _rounded_axis(node: Any, *, turned: bool, by_block: bool) -> int:
    """Axis of the written weight that has the scales: the outputs, or the inputs in blocks."""
    outputs = 0 if node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute) else 1
    axis = 1 - outputs if by_block else outputs
    return 1 - axis if turned else axis


def _replace_weight(model: Any, node: Any, nodes: list[Any], tensors: list[Any]) -> None:
    """Let a node read its weight from the last of these nodes, which are put before it."""
    node.input[1] = nodes[-1].output[0]
    model.graph.initializer.extend(tensors)
    place = list(model.graph.node).index(node)
    for made in reversed(nodes):
        model.graph.node.insert(place, made)


def _remove_unused(model: Any) -> None:
    """Remove the constants that no node reads."""
    used = {name for node in model.graph.node for name in node.input}
    left = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)


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


QUANTIZERS["by hand int8"] = _by_hand(8, unsigned=False, block=0, swap=True)
QUANTIZERS["by hand uint8, blocks"] = _by_hand(8, unsigned=True, block=16, swap=False)
QUANTIZERS["by hand int4, blocks"] = _by_hand(4, unsigned=False, block=16, swap=False)
QUANTIZERS["by hand uint4, blocks, transposed"] = _by_hand(4, unsigned=True, block=16, swap=True)


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


QUANTIZERS["olive dynamic"] = _olive("OnnxDynamicQuantization")
QUANTIZERS["olive static"] = _olive("OnnxStaticQuantization", data_config="rows", quant_format="QDQ")
QUANTIZERS["olive 4-bit blocks"] = _olive("OnnxBlockWiseRtnQuantization", block_size=16, is_symmetric=True)
QUANTIZERS["olive float16"] = _olive("OnnxFloatToFloat16", keep_io_types=True)


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


def _restore_mapping() -> None:
    """neural-compressor 2.6 reads tables that onnx has removed."""
    kinds = {np.dtype(name): getattr(onnx.TensorProto, kind) for name, kind in (
        ("float32", "FLOAT"), ("uint8", "UINT8"), ("int8", "INT8"), ("int32", "INT32"), ("int64", "INT64"),
        ("float16", "FLOAT16"), ("bool", "BOOL"))}  # fmt: skip
    vars(onnx)["mapping"] = SimpleNamespace(
        NP_TYPE_TO_TENSOR_TYPE=kinds, TENSOR_TYPE_TO_NP_TYPE={kind: dtype for dtype, kind in kinds.items()}
    )


def _inc(approach: str, form: str) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        _restore_mapping()
        inc = importlib.import_module("neural_compressor")
        inc.set_workspace(str(path.parent / "workspace"))
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


QUANTIZERS["inc static, pairs"] = _inc("static", "QDQ")
QUANTIZERS["inc static, operators"] = _inc("static", "default")
QUANTIZERS["inc dynamic"] = _inc("dynamic", "default")


def _modelopt(**how: Any) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        library = importlib.import_module("modelopt.onnx.quantization")
        library.quantize(
            str(network.path), calibration_data={"image": network.calibration}, output_path=str(path),
            calibration_eps=["cpu"], log_level="ERROR", **how,
        )  # fmt: skip

    return quantize


QUANTIZERS["modelopt int8"] = _modelopt(quantize_mode="int8")
QUANTIZERS["modelopt int4"] = _modelopt(quantize_mode="int4", calibration_method="rtn_dq", block_size=16)


def _onnxsim(function: str, *, calibrated: bool = False) -> Quantize:
    def quantize(network: Network, path: Path) -> None:
        library = importlib.import_module("onnxsim")
        model = onnx.load(network.path)
        for opset in model.opset_import:  # types and blocks that its functions do not raise the opset for
            opset.version = max(opset.version, 21) if opset.domain == "" else opset.version
        rows = [{"image": part} for part in np.array_split(network.calibration, 16)]
        how = {"calibration_data": rows} if calibrated else {}
        onnx.save(getattr(library, function)(model, **how), path)

    return quantize


# Its functions for HQQ and NF4 write rounded weights as float32, without levels: another float model, which FAILs.
QUANTIZERS["onnxsim weights int8"] = _onnxsim("quantize_weight_only")
QUANTIZERS["onnxsim weights int16"] = _onnxsim("quantize_weight_only_int16")
QUANTIZERS["onnxsim weights int4, blocks"] = _onnxsim("quantize_weight_only_int4")
QUANTIZERS["onnxsim weights int8, blocks"] = _onnxsim("quantize_weight_only_int8_block")
QUANTIZERS["onnxsim weights int4, MatMulNBits"] = _onnxsim("quantize_weight_only_matmul_nbits")
QUANTIZERS["onnxsim dynamic"] = _onnxsim("quantize_dynamic")
QUANTIZERS["onnxsim dynamic, fused"] = _onnxsim("quantize_dynamic_matmul_integer_to_float")
QUANTIZERS["onnxsim static"] = _onnxsim("quantize_static", calibrated=True)
QUANTIZERS["onnxsim static, int16"] = _onnxsim("quantize_static_int16", calibrated=True)
QUANTIZERS["onnxsim qoperator"] = _onnxsim("quantize_qoperator", calibrated=True)
QUANTIZERS["onnxsim float16"] = _onnxsim("quantize_fp16")


def _simplified(quantize_before: Quantize) -> Quantize:
    """Another quantizer's file through the simplifier, with constants and intermediate values renamed."""

    def quantize(network: Network, path: Path) -> None:
        library = importlib.import_module("onnxsim")
        before = path.with_name("before.onnx")
        quantize_before(network, before)
        model, _ = library.simplify(str(before))
        _rename_values(model)
        onnx.save(model, path)

    return quantize


def _rename_values(model: Any) -> None:
    """Replace all names but those of the inputs and outputs of the graph; subgraphs are not entered."""
    kept = {value.name for value in (*model.graph.input, *model.graph.output)} | {""}
    names: dict[str, str] = {}
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                values[place] = name if name in kept else names.setdefault(name, f"v{len(names)}")
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    del model.graph.value_info[:]


QUANTIZERS["onnxsim after ort qdq"] = _simplified(_ort_static("QDQ", per_channel=True))
QUANTIZERS["onnxsim after ort dynamic"] = _simplified(_ort_dynamic())
QUANTIZERS["onnxsim after ort 4-bit blocks"] = _simplified(_ort_blocks(4, 16, symmetric=False))
QUANTIZERS["onnxsim after by hand"] = _simplified(_by_hand(4, unsigned=True, block=16, swap=True))
