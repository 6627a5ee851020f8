"""Fixtures for tests of several commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import plugins
from onnx_ops.app import context
from onnx_ops.domain.target import Target
from tests.measure.scripted import Scripted


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the runtime, the machine's fingerprint and its load with fixed ones.

    The runtime times `good.onnx`, `wrong.onnx` and `int8.onnx`.
    """
    runtime = Scripted({Path("good.onnx"): 1.0, Path("wrong.onnx"): 1.2, Path("int8.onnx"): 0.6})
    machine = replace(
        runtime.fingerprint(Target(name="cpu-1t")), cpu_model="a CPU", cores=2, runtime_version="1"
    )
    monkeypatch.setattr(Scripted, "fingerprint", lambda *_: machine)
    load = plugins.load
    monkeypatch.setattr(
        plugins, "load", lambda kind, *rest: runtime if kind == "runtimes" else load(kind, *rest)
    )
    monkeypatch.setattr(context, "read_conditions", lambda: {"load": "0.10 0.20 0.30"})
