"""Training code belongs to the user, and its failures are reported as such."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MissingPackageError, NotFoundError, OnnxOpsError, StageError, UserError
from onnx_ops.pipeline.stages.train import execute
from onnx_ops.testing.fakes import FakeWorld


def train(root: Path, body: str, function: str = "train") -> None:
    module = f"user_{uuid.uuid4().hex}"
    (root / f"{module}.py").write_text(body, encoding="utf-8")
    settings: dict[str, Json] = {
        "run": f"{module}:{function}",
        "with_": {"seed": 1},
        "framework": "sklearn",
    }
    stage = Stage(id="train", kind=StageKind.TRAIN, settings=settings)
    context = replace(FakeWorld().context(root=root), exporter=lambda *_: SklearnExporter())
    execute(stage, digest_bytes(b""), {}, context)


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        ("import nowhere_at_all\n", MissingPackageError, "pip install nowhere_at_all"),
        ("undefined\n", UserError, "NameError"),
        ("1 / 0\n", UserError, "py:1: .* cannot be imported .ZeroDivisionError"),
        ("import json\ndef f(:\n", UserError, "py:2: .* cannot be imported .SyntaxError"),
        ("other = 1\n", NotFoundError, "train"),
        (
            "def train(data, seed):\n    raise KeyError('no such column')\n",
            UserError,
            "py:2: .* 'no such column'",
        ),
        (
            "import json\ndef train(data, seed):\n    json.loads('{')\n",
            UserError,
            "py:3: .*JSONDecodeError",
        ),
        (
            "def train(data, seed):\n    raise ConnectionError('no answer')\n",
            StageError,
            "py:2: .* no answer",
        ),
        ("def train(data):\n    return 1\n", UserError, "train.with: .* 'seed'"),
        ("def train(data, seed):\n    pass\n", UserError, "train.run: .* returned nothing"),
        ("def train(data, seed, depth):\n    return 1\n", UserError, "train.with: .* 'depth'"),
        (
            "def train(data, seed):\n    class A: pass\n    return A()\n",
            UserError,
            "train.run: the returned A cannot",
        ),
        (
            "def train(data, seed):\n    return lambda x: x\n",
            UserError,
            "train.run: the returned function cannot",
        ),
    ],
)
def test_train_with_fault_in_user_code_raises_matching_error(
    tmp_path: Path, body: str, kind: type[OnnxOpsError], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        train(tmp_path, body)
