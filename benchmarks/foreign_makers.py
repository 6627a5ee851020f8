"""Files as others make them, of many kinds: default exports, opsets, quantizers, odd graphs, broken files."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

Make = Callable[[Path], object]

_MAKERS: list[tuple[str, str, Make, bool]] = []
_OWN_TESTS = "onnx's own tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """One file in a folder of its own. `broken` says that no tool may take it."""

    kind: str
    name: str
    path: Path
    broken: bool


def files(folder: Path, *, step: int = 1, only: str = "") -> Iterator[ForeignFile]:
    """Every `step`-th of the kinds that begin with `only`: `folder/KIND/NAME/model.onnx`.

    They are made in a process of their own: a session that is forked from one with threads of a framework may hang.
    """
    command = [sys.executable, "-m", "benchmarks.foreign_makers", str(folder), str(step), only]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in made.stdout.splitlines():
        if line.startswith("{"):
            document = json.loads(line)
            yield ForeignFile(**{**document, "path": Path(document["path"])})


def _main(folder: Path, step: int, only: str) -> None:
    for number, (kind, name, make, broken) in enumerate(_all(only)):
        if number % step or not kind.startswith(only):
            continue
        path = folder / kind.replace(" ", "-") / name / "model.onnx"
        path.parent.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(path)
        if isinstance(made, onnx.ModelProto):
            onnx.save_model(made, path)
        print(json.dumps({"kind": kind, "name": name, "path": str(path), "broken": broken}), flush=True)


def _all(only: str) -> Iterator[tuple[str, str, Make, bool]]:
    yield from _MAKERS
    if _OWN_TESTS.startswith(only):  # all of them are built for a few
        yield from _backend_models()


def _maker(kind: str, name: str, *, broken: bool = False) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        _MAKERS.append((kind, name, make, broken))
        return make

    return keep


def _weights(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _initializer(name: str, array: Any) -> TensorProto:
    return numpy_helper.from_array(array, name)


# torch -------------------------------------------------------------------------------------------------------------


def _torch_nets() -> dict[str, tuple[Any, Any]]:
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
            return out

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.table(ids).mean(1))
            return out

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), torch.sigmoid(self.b(x))

    rows = torch.randn(2, 4)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return {
        "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), rows),
        "cnn": (
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
            ),
            torch.randn(2, 3, 8, 8),
        ),
        "lstm": (Lstm(), torch.randn(2, 5, 4)),
        "words": (Words(), torch.randint(0, 50, (2, 6))),
        "transformer": (nn.Sequential(layer, nn.Flatten(), nn.Linear(80, 3)), torch.randn(2, 5, 16)),
        "two-outputs": (Two(), rows),
        "groupnorm": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU()), torch.randn(2, 3, 8, 8)),
    }


_TORCH = ("mlp", "cnn", "lstm", "words", "transformer", "two-outputs", "groupnorm")


def _export_torch(net: str, **how: Any) -> Make:
    def make(path: Path) -> None:
        import torch

        module, rows = _torch_nets()[net]
        torch.onnx.export(module.eval(), (rows,), str(path), verbose=False, **how)

    return make


for _net in _TORCH:
    _maker("torch dynamo", _net)(_export_torch(_net, dynamo=True))
    _maker("torch legacy", _net)(_export_torch(_net, dynamo=False))
    _axes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    _maker("torch legacy, any batch", _net)(_export_torch(_net, dynamo=False, **_axes))
for _opset in (9, 11, 13, 15, 17, 20):
    _maker("torch opsets", f"opset-{_opset}")(_export_torch("cnn", dynamo=False, opset_version=_opset))


@_maker("torch dynamo", "half")
def _half(path: Path) -> None:
    import torch

    module, rows = _torch_nets()["mlp"]
    torch.onnx.export(module.eval().half(), (rows.half(),), str(path), dynamo=True, verbose=False)


@_maker("torch dynamo", "any-batch")
def _any_batch(path: Path) -> None:
    import torch

    module, rows = _torch_nets()["cnn"]
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(module.eval(), (rows,), str(path), dynamo=True, dynamic_shapes=shapes, verbose=False)


@_maker("torch dynamo", "training-dropout")
def _dropout(path: Path) -> None:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    torch.onnx.export(
        net.train(), (torch.randn(2, 4),), str(path), dynamo=False, training=torch.onnx.TrainingMode.TRAINING
    )


# scikit-learn, boosting --------------------------------------------------------------------------------------------


def _sklearn(name: str, make: Callable[[], Any], *, classes: bool = True, **options: Any) -> None:
    def write(_: Path) -> object:
        from skl2onnx import to_onnx
        from sklearn.datasets import load_diabetes, load_iris

        x, y = (load_iris if classes else load_diabetes)(return_X_y=True)
        x = x.astype(np.float32)
        model = make().fit(x, y)
        return to_onnx(model, x[:1], options={id(model): options} if options else None)

    _maker("skl2onnx with ZipMap" if classes and not options else "skl2onnx", name)(write)


def _estimator(module: str, name: str, **how: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"sklearn.{module}"), name)(**how)


for _module, _name, _how in (
    ("linear_model", "LogisticRegression", {"max_iter": 500}),
    ("ensemble", "RandomForestClassifier", {"n_estimators": 5, "random_state": 0}),
    ("ensemble", "GradientBoostingClassifier", {"n_estimators": 5, "random_state": 0}),
    ("ensemble", "ExtraTreesClassifier", {"n_estimators": 5, "random_state": 0}),
    ("svm", "SVC", {"probability": True, "random_state": 0}),
    ("neighbors", "KNeighborsClassifier", {}),
    ("naive_bayes", "GaussianNB", {}),
    ("tree", "DecisionTreeClassifier", {"random_state": 0}),
    ("neural_network", "MLPClassifier", {"max_iter": 50, "random_state": 0}),
    ("discriminant_analysis", "LinearDiscriminantAnalysis", {}),
):
    _sklearn(_name, _estimator(_module, _name, **_how))
_sklearn("LogisticRegression-plain", _estimator("linear_model", "LogisticRegression", max_iter=500), zipmap=False)
_sklearn("RandomForest-columns", _estimator("ensemble", "RandomForestClassifier", n_estimators=5), zipmap="columns")
for _module, _name, _how in (
    ("linear_model", "LinearRegression", {}),
    ("ensemble", "RandomForestRegressor", {"n_estimators": 5, "random_state": 0}),
    ("preprocessing", "StandardScaler", {}),
    ("cluster", "KMeans", {"n_clusters": 3, "random_state": 0, "n_init": 1}),
    ("decomposition", "PCA", {"n_components": 2}),
    ("gaussian_process", "GaussianProcessRegressor", {}),
):
    _sklearn(_name, _estimator(_module, _name, **_how), classes=False)


@_maker("skl2onnx", "texts")
def _texts(_: Path) -> object:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = np.array([["good thing"], ["bad thing"], ["good day"], ["bad day"]] * 5)
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(words[:, 0], [1, 0, 1, 0] * 5)
    return to_onnx(model, initial_types=[("text", StringTensorType([None, 1]))])


@_maker("skl2onnx", "mixed-columns")
def _mixed(_: Path) -> object:
    import pandas as pd
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = pd.DataFrame({"age": [20.0, 30, 40, 50] * 5, "town": ["a", "b", "c", "a"] * 5})
    columns = ColumnTransformer(
        [("n", StandardScaler(), ["age"]), ("c", OneHotEncoder(handle_unknown="ignore"), ["town"])]
    )
    model = make_pipeline(columns, LogisticRegression()).fit(frame, [0, 1, 1, 0] * 5)
    types = [("age", FloatTensorType([None, 1])), ("town", StringTensorType([None, 1]))]
    return to_onnx(model, initial_types=types)


def _boosted(name: str, make: Callable[[Any, Any], Any], convert: str) -> None:
    def write(_: Path) -> Any:
        import onnxmltools
        from onnxmltools.convert.common.data_types import FloatTensorType
        from sklearn.datasets import load_iris

        x, y = load_iris(return_X_y=True)
        model = make(x.astype(np.float32), y)
        types = [("x", FloatTensorType([None, 4]))]
        return getattr(onnxmltools, convert)(model, initial_types=types, target_opset=15)

    _maker("onnxmltools", name)(write)


def _xgboost(kind: str) -> Callable[[Any, Any], Any]:
    return lambda x, y: getattr(importlib.import_module("xgboost"), kind)(n_estimators=5).fit(x, y)


def _lightgbm(kind: str) -> Callable[[Any, Any], Any]:
    return lambda x, y: getattr(importlib.import_module("lightgbm"), kind)(n_estimators=5, verbose=-1).fit(x, y)


_boosted("XGBClassifier", _xgboost("XGBClassifier"), "convert_xgboost")
_boosted("XGBRegressor", _xgboost("XGBRegressor"), "convert_xgboost")
_boosted("LGBMClassifier", _lightgbm("LGBMClassifier"), "convert_lightgbm")
_boosted("LGBMRegressor", _lightgbm("LGBMRegressor"), "convert_lightgbm")


# graphs by hand ----------------------------------------------------------------------------------------------------


def _mlp(opset: int = 18, *, batch: int | str = "N", ir_version: int = 8, kind: str = "float32") -> onnx.ModelProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("MatMul", ["b", "w2"], ["y"]),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", element, [batch, 16])],
        [helper.make_tensor_value_info("y", element, [batch, 4])],
        [_initializer("w1", _weights(16, 32, dtype=kind)), _initializer("w2", _weights(32, 4, seed=1, dtype=kind))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def _mlp_file(_: Path, **how: Any) -> onnx.ModelProto:
    return _mlp(**how)


for _opset in range(7, 27):
    _maker("opsets", f"opset-{_opset}")(partial(_mlp_file, opset=_opset, ir_version=10 if _opset > 20 else 8))
for _ir in (4, 6, 8, 10, 12, 13):
    _maker("IR versions", f"ir-{_ir}")(partial(_mlp_file, opset=17, ir_version=_ir))
for _batch in (1, 4, 32):
    _maker("fixed batches", f"batch-{_batch}")(partial(_mlp_file, batch=_batch))
_maker("element types", "float16")(lambda _: _mlp(kind="float16"))
_maker("element types", "float64")(lambda _: _mlp(kind="float64"))


def _parsed(kind: str, name: str, text: str, **arrays: Any) -> None:
    def make(_: Path) -> onnx.ModelProto:
        model = parser.parse_model(text)
        model.graph.initializer.extend(_initializer(key, array) for key, array in arrays.items())
        return model

    _maker(kind, name)(make)


_H = '<ir_version: 9, opset_import: ["" : 18]>'
_parsed(
    "element types",
    "bfloat16",
    f"{_H} g (bfloat16[N,4] x) => (float[N,4] y) {{ a = Cast<to: int = 1>(x)\n y = Tanh(a) }}",
)
for _type in ("uint8", "int8", "int32", "int64", "uint16", "bool"):
    _parsed("element types", _type, f"{_H} g ({_type}[N,4] x) => (float[N,4] y) {{ y = Cast<to: int = 1>(x) }}")
_parsed("element types", "string", f"{_H} g (string[N,2] x) => (string[N,2] y) {{ y = Identity(x) }}")
_parsed(
    "subgraphs",
    "if",
    f"{_H} g (float[N,4] x) => (float[N,4] y) {{ m = ReduceMax<keepdims: int = 0>(x)\n z = Constant<value: tensor = "
    "float {0.0}>()\n c = Greater(m, z)\n y = If (c) <then_branch = t () => (float[N,4] a) { a = Relu(x) }, "
    "else_branch = e () => (float[N,4] b) { b = Neg(x) }> }",
)
_parsed(
    "subgraphs",
    "loop",
    f"{_H} g (float[N,4] x) => (float[N,4] y) {{ n = Constant<value: tensor = int64 {{3}}>()\n t = Constant<value: "
    "tensor = bool {1}>()\n y = Loop (n, t, x) <body = b (int64 i, bool c, float[N,4] v) => (bool d, float[N,4] w) "
    "{ d = Identity(c)\n w = Tanh(v) }> }",
)
_parsed(
    "subgraphs",
    "scan",
    f"{_H} g (float[5,4] x) => (float[4] s, float[5,4] y) {{ z = Constant<value: tensor = float[4] {{0.0,0.0,0.0,0.0}}"
    ">()\n s, y = Scan <body = b (float[4] c, float[4] v) => (float[4] d, float[4] w) { d = Add(c, v)\n w = Identity(d)"
    " }, num_scan_inputs: int = 1> (z, x) }",
)
_parsed(
    "functions",
    "own",
    '<ir_version: 9, opset_import: ["" : 18, "own" : 1]> g (float[N,4] x) => (float[N,4] y) { y = own.twice(x) } '
    '<opset_import: ["" : 18], domain: "own"> twice (x) => (y) { y = Add(x, x) }',
)
_parsed(
    "sequences and maps",
    "sequence-output",
    f"{_H} g (float[N,4] x) => (seq(float[N,2]) y) {{ y = SplitToSequence<axis: int = 1>(x, two) }}",
    two=np.array(2, np.int64),
)
_parsed(
    "sequences and maps",
    "sequence-and-tensor",
    f"{_H} g (float[N,4] x) => (seq(float[N,2]) y, float[N,4] z) {{ y = SplitToSequence<axis: int = 1>(x, two)\n "
    "z = Tanh(x) }",
    two=np.array(2, np.int64),
)
_parsed(
    "sequences and maps",
    "sequence-input",
    f"{_H} g (seq(float[N,2]) x) => (float[N,M] y) {{ y = ConcatFromSequence<axis: int = 1>(x) }}",
)
_parsed(
    "sequences and maps",
    "optional-output",
    f"{_H} g (float[N,4] x) => (optional(float[N,4]) y) {{ y = Optional(x) }}",
)
_parsed(
    "sequences and maps",
    "optional-input",
    f"{_H} g (optional(float[N,4]) x) => (float[N,4] y) {{ y = OptionalGetElement(x) }}",
)
_parsed("shapes", "constant", f"{_H} g () => (float[2] y) {{ y = Constant<value: tensor = float[2] {{1.0,2.0}}>() }}")
_parsed("shapes", "scalar", f"{_H} g (float x) => (float y) {{ y = Tanh(x) }}")
_parsed(
    "shapes",
    "two-free",
    f"{_H} g (float[N,T,4] x) => (float[N,4] y) {{ y = ReduceMean<keepdims: int = 0>(x, a) }}",
    a=np.array([1]),
)
_parsed(
    "shapes",
    "two-inputs",
    f"{_H} g (float[N,4] x, int64[N,3] i) => (float[N,3] y) {{ y = GatherElements<axis: int = 1>(x, i) }}",
)
_parsed("shapes", "no-rows", f"{_H} g (float[0,4] x) => (float[0,4] y) {{ y = Tanh(x) }}")
_parsed("random", "normal", f"{_H} g (float[N,4] x) => (float[N,4] y) {{ r = RandomNormalLike(x)\n y = Add(x, r) }}")
_parsed("random", "seeded", f"{_H} g (float[N,4] x) => (float[N,4] y) {{ r = RandomNormalLike<seed: float = 1.0>(x)\n "
        "y = Add(x, r) }")  # fmt: skip
_parsed("no numbers", "nan", f"{_H} g (float[N,4] x) => (float[N,4] y) {{ z = Sub(x, x)\n y = Div(z, z) }}")
_parsed(
    "other domains",
    "unknown",
    '<ir_version: 9, opset_import: ["" : 18, "acme" : 1]> g (float[N,4] x) => (float[N,4] y) { y = acme.Magic(x) }',
)
_parsed(
    "other domains",
    "contrib-gelu",
    '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]> g (float[N,4] x) => (float[N,4] y) '
    "{ y = com.microsoft.Gelu(x) }",
)


@_maker("shapes", "rank-unknown")
def _rank_unknown(_: Path) -> onnx.ModelProto:
    model = _mlp()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@_maker("shapes", "unnamed-dimensions")
def _unnamed(_: Path) -> onnx.ModelProto:
    model = _mlp()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].ClearField("value")
    return model


@_maker("IR versions", "weights-are-inputs")
def _weights_are_inputs(_: Path) -> onnx.ModelProto:
    model = _mlp(11, ir_version=3)
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return model


@_maker("shapes", "unnamed-nodes")
def _unnamed_nodes(_: Path) -> onnx.ModelProto:
    model = _mlp()
    for node in model.graph.node:
        node.name = ""
    return model


# external data -----------------------------------------------------------------------------------------------------


_DATA = "model.onnx.data"


def _external(name: str, change: Callable[[Path, onnx.ModelProto], object], *, broken: bool = False) -> None:
    def make(path: Path) -> None:
        onnx.save_model(_mlp(), path, save_as_external_data=True, location=_DATA, size_threshold=0)
        change(path, onnx.load(path, load_external_data=False))

    _maker("external data", name, broken=broken)(make)


def _place(path: Path, model: onnx.ModelProto, **entries: str) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


def _file_each(path: Path, _: onnx.ModelProto) -> None:
    path.with_name(_DATA).unlink()
    onnx.save_model(_mlp(), path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)


def _in_a_folder(path: Path, model: onnx.ModelProto) -> None:
    (path.parent / "weights").mkdir()
    path.with_name(_DATA).rename(path.parent / "weights/all.bin")
    _place(path, model, location="weights/all.bin")


def _link(path: Path, _: onnx.ModelProto) -> None:
    path.with_name(_DATA).unlink()
    path.with_name(_DATA).symlink_to("/etc/passwd")


_external("one-file", lambda *_: None)
_external("a-file-each", _file_each)
_external("in-a-folder", _in_a_folder)
_external("missing", lambda path, _: path.with_name(_DATA).unlink(), broken=True)
_external("cut", lambda path, _: os.truncate(path.with_name(_DATA), 100), broken=True)
_external("above", partial(_place, location=f"../{_DATA}"), broken=True)
_external("absolute", partial(_place, location="/etc/passwd"), broken=True)
_external("link", _link, broken=True)
_external("far-offset", partial(_place, offset="1000000"), broken=True)
_external("words-for-lengths", partial(_place, length="many"), broken=True)


@_maker("external data", "over-2-GB")
def _large(path: Path) -> None:
    """One weight of 2.2 GB, nearly all holes in a sparse file."""
    rows, columns = 33_600_000, 16
    with (path.parent / "weights.bin").open("wb") as file:
        file.write(_weights(1000, columns).tobytes())
        file.truncate(rows * columns * 4)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Gather", ["table", "i"], ["y"])],
            "large",
            [helper.make_tensor_value_info("i", TensorProto.INT64, ["N"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", columns])],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    tensor = model.graph.initializer.add(name="table", data_type=TensorProto.FLOAT, dims=[rows, columns])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    path.write_bytes(model.SerializeToString())


# quantizers, runtimes ----------------------------------------------------------------------------------------------


def _quantized(name: str, quantize: Callable[[Path, Path], object]) -> None:
    def make(path: Path) -> None:
        plain = path.parent / "plain.onnx"
        onnx.save_model(_mlp(21, ir_version=10), plain)
        quantize(plain, path)
        plain.unlink()

    _maker("quantizers", name)(make)


class _Rows:
    def __init__(self) -> None:
        self.rows = iter([{"x": _weights(8, 16, seed=seed)} for seed in range(4)])

    def get_next(self) -> Any:
        return next(self.rows, None)


def _static(**how: Any) -> Callable[[Path, Path], object]:
    def quantize(plain: Path, path: Path) -> None:
        from onnxruntime import quantization as q

        formats = {"qdq": q.QuantFormat.QDQ, "qoperator": q.QuantFormat.QOperator}
        settings = {**how, "quant_format": formats[how["quant_format"]]}
        q.quantize_static(str(plain), str(path), _Rows(), **settings)

    return quantize


def _dynamic(plain: Path, path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(plain), str(path))


def _narrow(bits: int) -> Callable[[Path, Path], object]:
    def quantize(plain: Path, path: Path) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(onnx.load(plain), bits=bits, block_size=16, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))

    return quantize


def _halved(*, keep: bool) -> Callable[[Path, Path], object]:
    def quantize(plain: Path, path: Path) -> None:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save_model(convert_float_to_float16(onnx.load(plain), keep_io_types=keep), path)

    return quantize


_quantized("dynamic", _dynamic)
_quantized("static-qdq", _static(quant_format="qdq"))
_quantized("static-qdq-per-channel", _static(quant_format="qdq", per_channel=True))
_quantized("static-qoperator", _static(quant_format="qoperator"))
_quantized("4-bit", _narrow(4))
_quantized("8-bit", _narrow(8))
_quantized("half", _halved(keep=False))
_quantized("half-inside", _halved(keep=True))


def _optimized(level: str) -> Make:
    def make(path: Path) -> None:
        import onnxruntime as ort

        plain = path.parent / "plain.onnx"
        onnx.save_model(_mlp(), plain)
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 3
        ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
        plain.unlink()

    return make


@_maker("optimized by ONNX Runtime", "ort-format")  # under a name that does not say so
def _ort_format(path: Path) -> None:
    import onnxruntime as ort

    plain = path.parent / "plain.onnx"
    onnx.save_model(_mlp(), plain)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    plain.unlink()


for _level in ("BASIC", "EXTENDED", "ALL"):
    _maker("optimized by ONNX Runtime", _level.lower())(_optimized(_level))


# broken ------------------------------------------------------------------------------------------------------------


def _bytes(name: str, make: Callable[[], bytes]) -> None:
    _maker("broken", name, broken=True)(lambda path: path.write_bytes(make()))


_bytes("empty", lambda: b"")
_bytes("cut", lambda: _mlp().SerializeToString()[:900])
_bytes("text", lambda: b"a model, surely\n")
_bytes("zeros", lambda: bytes(1000))
_bytes("noise", lambda: np.random.default_rng(0).bytes(5000))
_bytes("gzip", lambda: gzip.compress(_mlp().SerializeToString()))
_bytes("pickle", lambda: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.")
_bytes("zip", lambda: b"PK\x03\x04" + bytes(60))
_bytes("hdf5", lambda: b"\x89HDF\r\n\x1a\n" + bytes(500))


def _changed(name: str, change: Callable[[onnx.ModelProto], object]) -> None:
    def make(path: Path) -> None:
        model = _mlp()
        change(model)
        path.write_bytes(model.SerializeToString())

    _maker("broken", name, broken=True)(make)


_changed("no-nodes", lambda model: model.graph.ClearField("node"))
_changed("no-outputs", lambda model: model.graph.ClearField("output"))
_changed("no-opset", lambda model: model.ClearField("opset_import"))
_maker("too new", "future-opset")(lambda _: _mlp(99))
_maker("too new", "future-ir")(lambda _: _mlp(ir_version=99))
_changed("unknown-operator", lambda model: setattr(model.graph.node[1], "op_type", "Relux"))
_changed("missing-weight", lambda model: model.graph.initializer.pop())
_changed("doubled-name", lambda model: model.graph.node[1].output.__setitem__(0, "a"))
_changed("cycle", lambda model: model.graph.node[0].input.__setitem__(0, "b"))
_changed("wrong-shape", lambda model: model.graph.initializer[0].dims.__setitem__(0, 15))
_changed("wrong-type", lambda model: setattr(model.graph.initializer[0], "data_type", TensorProto.INT64))
_changed("unknown-type", lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 77))
_changed("wrong-attribute", lambda model: model.graph.node[1].attribute.append(helper.make_attribute("axis", "word")))
_changed(
    "huge-dimension", lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 1 << 60)
)


_CASES = (
    *("abs", "argmax", "averagepool", "batchnorm", "concat", "conv", "cumsum", "einsum", "gather", "gemm", "gru"),
    *("layernormalization", "lstm", "matmul", "maxpool", "nonmaxsuppression", "onehot", "pad", "reduce_sum", "resize"),
    *("slice", "softmax", "split", "tfidfvectorizer", "topk", "where"),
)


def _backend_models() -> Iterator[tuple[str, str, Make, bool]]:
    """One model of the onnx package's own tests for each of some operators."""
    from onnx.backend.test.loader import load_node_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = {case.name.removeprefix("test_"): case.model for case in load_node_model_tests()}
    for operator in _CASES:
        name = next((name for name in models if name.startswith(operator)), None)
        if name is not None:
            yield _OWN_TESTS, name, partial(_given, models[name]), False


def _given(model: object, _: Path) -> object:
    return model


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
