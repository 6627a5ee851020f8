"""A small project on disk with one valid pipeline file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.config.loader import load_pipeline
from onnx_ops.config.reach import Reach
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.errors import ConfigError, Problem

PIPELINE = """\
pipeline: toy
data:
  train: {sklearn: digits, split: train}
  test: {sklearn: digits, split: test}
train:
  run: models.toy:train
  with: {epochs: 3}
export:
  framework: sklearn
quantize:
  - {name: small, method: static, calibrate: {data: train}}
benchmark:
  targets: [cpu-1t]
gates:
  - {kind: parity}
  - {kind: metric, max_drop: 1%}
  - {kind: latency, p99: 5 ms}
register: {model: toy}
deploy:
  - {endpoint: toy, target: cpu-1t, rollout: {steps: [10%, 100%]}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project's root, which is also the working directory."""
    for folder in ("configs/targets", "configs/pipelines", "models"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "configs/targets/cpu-1t.yaml").write_text("name: cpu-1t\n")
    (tmp_path / "configs/targets/old.yaml").write_text(
        "name: old\nmax_opset: 15\nmax_ir_version: 9\n"
    )
    (tmp_path / "models/toy.py").write_text(
        "import nowhere\n\ndef train(data, epochs=1, **others):\n    raise SystemExit\n"
    )
    (tmp_path / "toy.yaml").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pipeline_text() -> str:
    return PIPELINE


@pytest.fixture
def load(project: Path) -> Callable[..., Pipeline]:
    """Return a function that loads a text as the pipeline file.

    It passes further arguments to `load_pipeline`. All variables and paths are allowed.
    """
    reach = Reach(variables=("*",), paths=("/",))

    def load(text: str = PIPELINE, **options: Any) -> Pipeline:
        (project / "toy.yaml").write_text(text, encoding="utf-8")
        return load_pipeline(
            project / "toy.yaml", root=project, **{"environ": {}, "reach": reach, **options}
        )

    return load


@pytest.fixture
def find_problems(load: Callable[..., Pipeline]) -> Callable[..., tuple[Problem, ...]]:
    """Return a function that returns the problems of a text as the pipeline file.

    A valid text has none.
    """

    def find(text: str = PIPELINE, **options: Any) -> tuple[Problem, ...]:
        try:
            load(text, **options)
        except ConfigError as error:
            return error.problems
        return ()

    return find


@pytest.fixture
def problems(find_problems: Callable[..., tuple[Problem, ...]]) -> Callable[..., list[str]]:
    """Return a function that returns the problems as printed lines."""
    return lambda text, **options: [str(problem) for problem in find_problems(text, **options)]


@pytest.fixture
def problems_after(problems: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return a function that lists the problems of a changed valid file.

    It replaces one text in the file, and removes the name of the file from the problems.
    """

    def replaced(old: str, new: str) -> list[str]:
        assert PIPELINE.count(old) == 1
        return [
            problem.removeprefix("toy.yaml:") for problem in problems(PIPELINE.replace(old, new))
        ]

    return replaced
