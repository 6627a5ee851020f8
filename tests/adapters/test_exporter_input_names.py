"""Inputs are bound by name, in any order of the data.

An export gives the output of its source when the source is called by name.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.data.file import read_arrays
from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import HuggingfaceExporter, KerasExporter, TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.measure.input_use import find_unused_inputs
from onnx_ops.measure.parity import REFERENCE_TARGET, find_worst, measure_parity
from onnx_ops.measure.reference_outputs import collect_reference_outputs
from onnx_ops.onnx_graph.rewrites import rename_values
from onnx_ops.ports import Dataset, Exporter, ExportRequest, Tensors
from onnx_ops.ports.data import frame_of
from tests.adapters.model_runs import piped, reference, run, sk

ROOT = Path(__file__).parents[2]
SEED = 20261127
DRAW = np.random.default_rng(SEED)
TABLE: dict[str, Any] = {
    name: DRAW.normal(size=(64, 1)).astype(np.float32) for name in ("income", "age", "visits")
}
FITTED = ["income", "visits", "age"]
"""Order of the columns at fit time, neither that of the table nor alphabetical."""

TARGET = (3 * TABLE["income"] - TABLE["age"] + 0.3 * TABLE["visits"])[:, 0]
PAIR: dict[str, Any] = {
    name: DRAW.normal(size=(64, 3)).astype(np.float32) for name in ("user", "item")
}
TOKENS: Tensors = {
    "input_ids": DRAW.integers(0, 17, (64, 8)),
    "attention_mask": np.tile((np.arange(8) < 5).astype(np.int64), (64, 1)),
}


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model with several inputs, and its output when it is called by name.

    `ordered`: the model has no names, and takes the inputs in the order of `inputs` only.
    """

    exporter: Exporter
    make: Callable[[], Any]
    inputs: Tensors
    ask: Callable[[Any, Tensors], Any]
    ordered: bool = False


def table(exporter: Exporter, make: Callable[[], Any], *, names: bool) -> NamedModel:
    def fit() -> Any:
        frame = frame_of(TABLE)[FITTED]
        return make().fit(frame if names else frame.to_numpy(), TARGET)

    def ask(model: Any, rows: Tensors) -> Any:
        frame = frame_of(rows)[FITTED]
        return model.predict(frame if names else frame.to_numpy()).reshape(-1, 1)

    inputs = TABLE if names else {name: TABLE[name] for name in FITTED}
    return NamedModel(exporter=exporter, make=fit, inputs=inputs, ask=ask, ordered=not names)


def boosted(package: str, name: str) -> Callable[[], Any]:
    settings: dict[str, Any] = {"n_estimators": 20, "n_jobs": 1, "random_state": 0}
    if package == "lightgbm":
        settings |= {"verbose": -1, "min_child_samples": 2}
    return lambda: getattr(importlib.import_module(package), name)(**settings)


def tensors(rows: Tensors) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    return {name: torch.from_numpy(array.copy()) for name, array in rows.items()}


def module(name: str, inputs: Tensors = PAIR, *, ordered: bool = False) -> NamedModel:
    def ask(model: Any, rows: Tensors) -> Any:
        named = tensors(rows)
        return model(*(named[key] for key in inputs)) if ordered else model(**named)

    return NamedModel(
        exporter=TorchExporter(),
        make=lambda: getattr(importlib.import_module("tests.support.torch_modules"), name)().eval(),
        inputs=inputs,
        ask=ask,
        ordered=ordered,
    )


def keras(make: Callable[[], Any]) -> NamedModel:
    return NamedModel(
        exporter=KerasExporter(),
        make=make,
        inputs=PAIR,
        ask=lambda model, rows: model(tensors(rows)),
    )


def load_keras_package() -> Any:
    """Import and return Keras on its PyTorch backend.

    Keras chooses its backend when it is first imported.
    """
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return importlib.import_module("keras")


def keras_functional() -> Any:
    keras = load_keras_package()
    user, item = keras.Input((3,), name="user"), keras.Input((3,), name="item")
    return keras.Model([user, item], keras.layers.Dense(2)(user - 2.0 * item)).eval()


def keras_functional_with_a_dictionary() -> Any:
    keras = load_keras_package()
    inputs = {name: keras.Input((3,), name=name) for name in ("user", "item")}
    return keras.Model(inputs, keras.layers.Dense(2)(inputs["user"] - 2.0 * inputs["item"])).eval()


def keras_subclass(*, dictionary: bool) -> Any:
    keras = load_keras_package()

    class Base(keras.Model):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.last = keras.layers.Dense(2)
            self.last.build((None, 3))

    @keras.saving.register_keras_serializable()
    class OfDictionary(Base):
        def call(self, inputs: Any) -> Any:
            return self.last(inputs["user"] - 2.0 * inputs["item"])

    @keras.saving.register_keras_serializable()
    class OfArguments(Base):
        def build(self, user_shape: Any, item_shape: Any) -> None:
            self.built = True

        def call(self, user: Any, item: Any, training: bool = False) -> Any:
            return self.last(user - 2.0 * item)

    return (OfDictionary if dictionary else OfArguments)().eval()


def bert() -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    importlib.import_module("torch").manual_seed(SEED)
    config = transformers.BertConfig(
        vocab_size=17, num_labels=4, attn_implementation="eager", **sizes
    )
    return transformers.BertForSequenceClassification(config).eval()


def linear() -> Any:
    return sk("linear_model.LinearRegression")


def scaled() -> Any:
    return piped(sk("preprocessing.StandardScaler"), sk("linear_model.Ridge"))


def forest() -> Any:
    return sk("ensemble.RandomForestRegressor", 8, random_state=0)


def by_column() -> Any:
    steps = [
        ("few", sk("preprocessing.StandardScaler"), ["age", "visits"]),
        ("rest", "passthrough", ["income"]),
    ]
    return piped(sk("compose.ColumnTransformer", steps), sk("linear_model.Ridge"))


SK, XGB, LGBM = SklearnExporter(), XgboostExporter(), LightgbmExporter()
MODELS: dict[str, NamedModel] = {
    "linear on a frame": table(SK, linear, names=True),
    "linear on a matrix": table(SK, linear, names=False),
    "pipeline on a frame": table(SK, scaled, names=True),
    "pipeline on a matrix": table(SK, scaled, names=False),
    "forest on a frame": table(SK, forest, names=True),
    "ColumnTransformer on a frame": table(SK, by_column, names=True),
    "XGBoost on a frame": table(XGB, boosted("xgboost", "XGBRegressor"), names=True),
    "XGBoost on a matrix": table(XGB, boosted("xgboost", "XGBRegressor"), names=False),
    "LightGBM on a frame": table(LGBM, boosted("lightgbm", "LGBMRegressor"), names=True),
    "LightGBM on a matrix": table(LGBM, boosted("lightgbm", "LGBMRegressor"), names=False),
    "torch": module("Difference"),
    "torch, optional inputs left out": module(
        "Optionals", {"x": PAIR["user"], "bias": PAIR["item"]}
    ),
    "torch, any inputs": module("AnyInputs", ordered=True),
}
HEAVY: dict[str, NamedModel] = {
    "torch, keyword only": module("Optionals", {"x": PAIR["user"], "scale": PAIR["item"]}),
    "Keras, functional": keras(keras_functional),
    "Keras, functional of a dictionary": keras(keras_functional_with_a_dictionary),
    "Keras, subclass of a dictionary": keras(lambda: keras_subclass(dictionary=True)),
    "Keras, subclass of arguments": NamedModel(
        exporter=KerasExporter(),
        make=lambda: keras_subclass(dictionary=False),
        inputs=PAIR,
        ask=lambda model, rows: model(**tensors(rows)),
    ),
    "transformers": NamedModel(
        exporter=HuggingfaceExporter(),
        make=bert,
        inputs=TOKENS,
        ask=lambda model, rows: model(**tensors(rows)).logits,
    ),
}


def all_models() -> list[Any]:
    marks = [
        pytest.mark.nightly,
        pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    ]
    return [*MODELS, *(pytest.param(name, marks=marks) for name in HEAVY)]


def request_of(samples: Tensors, path: Path, *, ordered: bool) -> ExportRequest:
    return ExportRequest(
        section=Export(framework="any"), samples=samples, path=path, ordered=ordered
    )


@pytest.mark.parametrize("name", all_models())
def test_export_with_inputs_in_any_order_equals_source_or_raises_user_error_if_unnamed(
    name: str, tmp_path: Path
) -> None:
    case = (MODELS | HEAVY)[name]
    model, path = case.make(), tmp_path / "model.onnx"
    torch = importlib.import_module("torch")
    with torch.no_grad():
        expected = np.asarray(case.ask(model, case.inputs))
    for order in itertools.permutations(case.inputs):
        samples = {key: case.inputs[key] for key in order}
        if case.ordered and list(order) != list(case.inputs):
            with pytest.raises(UserError, match="order is not declared") as refused:
                case.exporter.export(model, request_of(samples, path, ordered=False))
            assert "columns: [FIRST, SECOND]" in refused.value.remedy
            continue
        case.exporter.export(model, request_of(samples, path, ordered=case.ordered))
        for answers in (run(path, samples), reference(case.exporter, model, samples)):
            (array,) = answers.values()
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)
        (array,) = run(path, case.inputs).values()
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)


def test_export_of_example_table_with_reordered_columns_equals_source(tmp_path: Path) -> None:
    example, path = importlib.import_module("examples.churn_table"), tmp_path / "model.onnx"
    columns = dict(read_arrays(ROOT / "examples" / "data" / "churn-train.csv", where="train"))
    label = columns.pop("churned")[:, 0]
    del columns["customer"]
    model = example.train({"train": Dataset(inputs=columns, label=label)})
    expected = model.predict_proba(frame_of(columns))
    for order in (list(columns), sorted(columns), sorted(columns, reverse=True)):
        samples = {name: columns[name] for name in order}
        SK.export(model, request_of(samples, path, ordered=False))
        for answers in (run(path, columns), reference(SK, model, samples, "float64")):
            np.testing.assert_allclose(answers["probabilities"], expected, atol=1e-5)


def find_fault(case: NamedModel, model: Any, path: Path) -> bool:
    """Return whether the validate stage's parity check rejects the file at `path`."""
    groups = collect_reference_outputs(case.exporter, model, path, case.inputs).groups
    return find_worst(measure_parity(OnnxRuntime(), path, REFERENCE_TARGET, groups)) is not None


def exchange_inputs(path: Path, one: str, other: str) -> None:
    proto = onnx.load(path)
    rename_values(proto.graph, {one: other, other: one})
    onnx.save(proto, path)


@pytest.mark.parametrize("name", all_models())
def test_parity_with_exchanged_inputs_fails(name: str, tmp_path: Path) -> None:
    case = (MODELS | HEAVY)[name]
    model, path = case.make(), tmp_path / "model.onnx"
    case.exporter.export(model, request_of(case.inputs, path, ordered=case.ordered))
    assert not find_fault(case, model, path)
    for one, other in itertools.combinations(case.inputs, 2):
        exchange_inputs(path, one, other)
        assert find_fault(case, model, path), f"{one} and {other} are exchanged"
        exchange_inputs(path, one, other)


def test_parity_with_exchanged_outputs_fails(tmp_path: Path) -> None:
    case = module("Outputs")
    model, path = case.make(), tmp_path / "model.onnx"
    case.exporter.export(model, request_of(case.inputs, path, ordered=False))
    proto = onnx.load(path)
    names = [value.name for value in proto.graph.output]
    for one, other in itertools.combinations(names, 2):
        faulty = onnx.ModelProto()
        faulty.CopyFrom(proto)
        rename_values(faulty.graph, {one: other, other: one})
        onnx.save(faulty, path)
        assert find_fault(case, model, path), f"{one} and {other} are exchanged"


@pytest.mark.parametrize("kind", ["linear on a frame", "linear on a matrix", "XGBoost on a frame"])
def test_parity_with_exchanged_columns_of_joined_matrix_fails(kind: str, tmp_path: Path) -> None:
    case = MODELS[kind]
    model, path = case.make(), tmp_path / "model.onnx"
    case.exporter.export(model, request_of(case.inputs, path, ordered=case.ordered))
    proto = onnx.load(path)
    (joined,) = (node for node in proto.graph.node if node.name == "join_columns")
    columns = list(joined.input)
    for order in itertools.permutations(columns):
        joined.input[:] = order
        onnx.save(proto, path)
        assert find_fault(case, model, path) == (list(order) != columns), order


def test_parity_of_exporter_with_wrong_binding_order_fails(tmp_path: Path) -> None:
    """The source is called directly, and not through the exporter's binding."""

    class Wrong(TorchExporter):
        def _module(self, model: Any, request: ExportRequest) -> Any:
            return importlib.import_module("tests.support.torch_modules").Exchanged(model)

    case = module("Difference")
    model, path = case.make(), tmp_path / "model.onnx"
    Wrong().export(model, request_of(case.inputs, path, ordered=False))
    assert find_fault(case, model, path)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("Difference", ("user", "itm"), "has no input 'itm'.*Did you mean 'item'"),
        ("Difference", ("left", "right"), r"has no input 'left' \(it takes user, item\)"),
        ("Difference", ("user",), "also takes 'item'"),
        ("Optionals", ("bias",), "also takes 'x'"),
        ("Swallowing", ("user", "itm"), "has no input 'itm'"),
        ("Mixed", ("user", "item"), "has no input 'item'"),
        ("AnyNames", ("user", "item"), "has no input 'user'.*Name each input as a parameter"),
    ],
)
def test_torch_export_with_missing_or_unknown_inputs_of_forward_raises_user_error(
    name: str, inputs: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    model = getattr(importlib.import_module("tests.support.torch_modules"), name)()
    samples = dict.fromkeys(inputs, PAIR["user"])
    with pytest.raises(UserError, match=message):
        TorchExporter().export(model, request_of(samples, tmp_path / "m.onnx", ordered=True))


@pytest.mark.nightly
def test_huggingface_export_with_unknown_input_raises_user_error(tmp_path: Path) -> None:
    for wrong in ("attention_masks", "past_key_values.0.key"):
        samples = {"input_ids": TOKENS["input_ids"], wrong: TOKENS["attention_mask"]}
        with pytest.raises(UserError, match=f"has no input '{wrong}'"):
            HuggingfaceExporter().export(
                bert(), request_of(samples, tmp_path / "m.onnx", ordered=True)
            )


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_load_keras_model_with_unloadable_weights_raises_user_error(tmp_path: Path) -> None:
    keras = load_keras_package()

    @keras.saving.register_keras_serializable()
    class Unbuilt(keras.Model):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.last = keras.layers.Dense(2)

        def call(self, user: Any, item: Any) -> Any:
            return self.last(user - 2.0 * item)

    model = Unbuilt()
    model(**tensors(PAIR))
    KerasExporter().save(model, tmp_path)
    with pytest.raises(UserError, match=r"did not load the weights.*Define `build`"):
        KerasExporter().load(tmp_path)


def test_find_unused_inputs_returns_input_without_effect(tmp_path: Path) -> None:
    for name, unused in (("Difference", ()), ("Ignoring", ("item",))):
        case = module(name)
        model, path = case.make(), tmp_path / f"{name}.onnx"
        case.exporter.export(model, request_of(case.inputs, path, ordered=False))
        groups = collect_reference_outputs(case.exporter, model, path, case.inputs).groups
        assert find_unused_inputs(OnnxRuntime(), path, REFERENCE_TARGET, groups) == unused
