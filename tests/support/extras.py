"""Tests of what an extra brings: skipped, and loudly, where it is not installed; or run as if it were not."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from onnx_ops import plugins


def require(module: str, *, reason: str) -> None:
    """Skip the test file that calls this unless the module is installed.

    Unlike `pytest.importorskip` it does not import the module, which may take as long as all tests
    of the file.
    """
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is part of
        found = False
    if not found:
        pytest.skip(reason, allow_module_level=True)


def hide(monkeypatch: pytest.MonkeyPatch, *distributions: str) -> None:
    """Let onnx-ops believe that distributions are not installed."""
    version = plugins.version
    monkeypatch.setattr(
        plugins, "version", lambda name: plugins.MISSING if name in distributions else version(name)
    )
