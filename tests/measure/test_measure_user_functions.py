"""Calls of a project's training function."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.errors import UserError
from onnx_ops.measure.user_functions import call_training, importable

CODE = """
def on_data(data, depth): return ["on_data", *data, depth]
def on_all(*data): return ["on_all", *map(sorted, data)]
def own_data(*, depth=2): return ["own_data", depth]
"""


def test_call_training_with_withheld_data_set_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / "asking_training.py").write_text("def train(data): return data['test']")
    with importable(tmp_path), pytest.raises(UserError) as caught:
        call_training("asking_training:train", {"train": 1, "extra": 2}, {})
    assert "'test', which it does not receive" in caught.value.what
    assert "except that of validate.samples" in caught.value.why
    assert "'train', 'extra'" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "parameters", "model"),
    [
        ("on_data", {"depth": 3}, ["on_data", "train", 3]),
        ("on_all", {}, ["on_all", ["train"]]),
        ("own_data", {}, ["own_data", 2]),
        ("own_data", {"depth": 5}, ["own_data", 5]),
    ],
)
def test_call_training_passes_accepted_data_and_rejects_unknown_parameter(
    tmp_path: Path, name: str, parameters: dict[str, int], model: list[object]
) -> None:
    (tmp_path / "called_training.py").write_text(CODE)
    with importable(tmp_path):
        assert call_training(f"called_training:{name}", {"train": 1}, parameters) == model
        with pytest.raises(UserError, match="cannot be called"):
            call_training(f"called_training:{name}", {"train": 1}, {"width": 1})
