"""Edits of a model's classes while its weights stay the same.

The export must answer as the edited code does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.domain.artifact import MODEL_FILE
from onnx_ops.domain.plan import StageKind
from onnx_ops.measure.files import MODEL, checkout_files
from tests.support.must import must

TORCH = """
import torch
from .constants import FACTOR

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return FACTOR * self.linear(x)

def made(x, y):
    return Net()

def answers(model, x):
    return model(torch.from_numpy(x)).detach().numpy()
"""
SKLEARN = """
import numpy as np
from skl2onnx import update_registered_converter
from skl2onnx.algebra.onnx_ops import OnnxMul
from skl2onnx.common.data_types import FloatTensorType
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.pipeline import Pipeline
from .constants import FACTOR
ESTIMATOR

class Scale(TransformerMixin, BaseEstimator):
    def fit(self, x, y=None):
        return self

    def __sklearn_is_fitted__(self):
        return True

    def transform(self, x):
        return FACTOR * x

def shapes(operator):
    operator.outputs[0].type = FloatTensorType([None, 3])

def convert(scope, operator, container):
    factor = np.array([FACTOR], dtype=np.float32)
    product = OnnxMul(
        operator.inputs[0], factor, op_version=container.target_opset, output_names=operator.outputs[:1]
    )
    product.add_to(scope, container)

update_registered_converter(Scale, "ShopScale", shapes, convert)

def made(x, y):
    return Pipeline([("scale", Scale()), ("model", Estimator().fit(x, y))])

def answers(model, x):
    return model.predict(x).reshape(-1, 1)
"""  # noqa: E501
KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
from .constants import FACTOR

@keras.saving.register_keras_serializable(package="shop")
class Scale(keras.layers.Layer):
    def call(self, x):
        return FACTOR * x

def made(x, y):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), Scale(), keras.layers.Dense(2)])

def answers(model, x):
    return model(x).detach().numpy()
"""
HUGGINGFACE = """
import torch
from transformers import BertConfig, BertModel
from .constants import FACTOR

def made(x, y):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=9, hidden_size=4 * FACTOR, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=8, max_position_embeddings=8)
    return BertModel(config).eval()

def answers(model, x):
    return model(input_ids=torch.from_numpy(x)).last_hidden_state.detach().numpy()
"""  # noqa: E501
ONNX = """
import pathlib, tempfile
import onnx.parser
from .constants import FACTOR

def made(x, y):
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    onnx.save(onnx.parser.parse_model('''
        <ir_version: 10, opset_import: ["": 18]>
        g (float[batch, 3] x) => (float[batch, 3] y) <float factor = {%d}> { y = Mul(x, factor) }''' % FACTOR), path)
    return path

def answers(model, x):
    return FACTOR * x
"""  # noqa: E501
NETS = {
    "sklearn": SKLEARN.replace(
        "ESTIMATOR", "from sklearn.linear_model import LinearRegression as Estimator"
    ),
    "xgboost": SKLEARN.replace("ESTIMATOR", "from xgboost import XGBRegressor as Estimator"),
    "lightgbm": SKLEARN.replace(
        "ESTIMATOR", "from lightgbm import LGBMRegressor as Estimator"
    ).replace("Estimator()", "Estimator(min_child_samples=2, verbose=-1)"),
    "torch": TORCH,
    "keras": KERAS,
    "huggingface": HUGGINGFACE,
    "onnx": ONNX,
}
EDITS = {
    "a constant that the class imports": ("constants.py", "FACTOR = 2", "FACTOR = 3"),
    "the class's module": ("net.py", "import FACTOR", "import FACTOR as BASE\nFACTOR = 2 * BASE"),
}
TRAINING = """
from shop import made

def train(data):
    return made(data["train"].inputs["x"], data["train"].label)
"""
PIPELINE = """
pipeline: stale
data:
  train: {{file: data.npz, inputs: {{x: x}}, label: y}}
  test: {{file: data.npz, inputs: {{{input}: x}}}}
train: {{run: "training:train"}}
export: {{framework: {framework}}}
benchmark: {{targets: [cpu]}}
"""
ANSWER = """
import numpy as np
import shop
data = np.load("data.npz")
np.save("answers.npy", shop.answers(shop.made(data["x"], data["y"]), data["x"]))
"""


def make_project(framework: str, tmp_path: Path) -> Project:
    texts = framework == "huggingface"
    files = {
        "onnx-ops.toml": 'signing = "off"\n',
        "configs/targets/cpu.yaml": "name: cpu\n",
        "shop/__init__.py": "from .net import answers, made\n",
        "shop/net.py": NETS[framework],
        "shop/constants.py": "FACTOR = 2\n",
        "training.py": TRAINING,
        "other.py": "class Net: ...\n",
        "stale.yaml": PIPELINE.format(framework=framework, input="input_ids" if texts else "x"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    draw = np.random.default_rng(0)
    x = draw.integers(0, 9, (40, 5)) if texts else draw.standard_normal((40, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(axis=1).astype(np.float32))
    return open_project(tmp_path)


def run(project: Project, folder: str) -> tuple[set[str], np.ndarray]:
    """Return the executed stages, and the answers of the export."""
    root = project.settings.root
    result = execute(project, prepare(project, root / "stale.yaml", until=StageKind.EXPORT))
    assert not result.errors
    exported = must(result.outcomes["export"].manifest)
    path = checkout_files(project.context.store, exported, MODEL, root / folder) / MODEL_FILE
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    answer = session.run(None, {given.name: np.load(root / "data.npz")["x"]})[0]
    return set(result.executed()), np.asarray(answer)


def source_answers(root: Path) -> np.ndarray:
    """Return the answers of the present code, computed in a separate process."""
    subprocess.run([sys.executable, "-c", ANSWER], cwd=root, check=True, timeout=300)
    return np.asarray(np.load(root / "answers.npy"))


@pytest.mark.parametrize(
    ("framework", "edit"),
    [
        pytest.param(
            framework,
            edit,
            marks=()
            if (framework, edit) == ("sklearn", "a constant that the class imports")
            else pytest.mark.nightly,
        )
        for framework in NETS
        for edit in EDITS
    ],
)
def test_export_after_class_edit_computes_edited_function(
    framework: str, edit: str, tmp_path: Path
) -> None:
    project = make_project(framework, tmp_path)
    first = run(project, "first")[1]
    (tmp_path / "other.py").write_text("class Net:\n    pass\n")
    assert run(project, "same")[0] == set()
    name, old, new = EDITS[edit]
    path = tmp_path / "shop" / name
    path.write_text(path.read_text().replace(old, new))
    did, second = run(project, "second")
    assert did == {"train", "export"}
    np.testing.assert_allclose(second, source_answers(tmp_path), rtol=1e-4, atol=1e-5)
    assert second.shape != first.shape or np.abs(second - first).max() > 0.01
    assert run(project, "again")[0] == set()
