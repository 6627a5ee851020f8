"""Fixtures for the tests of heavy frameworks.

They are environments that are made once, and rows of bundled data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnx_ops import plugins
from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter
from onnx_ops.adapters.isolation.process import ProcessLimits
from onnx_ops.domain.execution import Environment
from onnx_ops.ports import Dataset
from tests.adapters import runtime_places

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> PythonEnvironments:
    return PythonEnvironments(folder=runtime_places.environments(tmp_path_factory), uv=find_uv())


@pytest.fixture(scope="session")
def isolated(environments: PythonEnvironments) -> Callable[[str], IsolatedExporter]:
    """Return a function that returns the exporter of an isolated framework.

    Each framework has its own environment.
    """

    def make(framework: str) -> IsolatedExporter:
        wanted = Environment(requirements=plugins.load("exporters", framework).requirements)
        return IsolatedExporter(
            place=plugins.find("exporters", framework).value,
            python=lambda: environments.python(wanted),
            root=ROOT,
            limits=ProcessLimits(timeout=600.0),
        )

    return make


@pytest.fixture(scope="session")
def digits() -> Dataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    return Dataset(inputs={"x": data.data.astype(np.float32)}, label=data.target)
