"""Tests of optional dependencies.

A test is skipped with a visible reason if an extra is not installed, or runs as if it were not
installed.
"""

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
    except ModuleNotFoundError:
        # The parent package is missing too.
        found = False
    if not found:
        pytest.skip(reason, allow_module_level=True)


def hide(monkeypatch: pytest.MonkeyPatch, *distributions: str) -> None:
    """Make onnx-ops treat distributions as not installed."""
    version = plugins.version
    monkeypatch.setattr(
        plugins, "version", lambda name: plugins.MISSING if name in distributions else version(name)
    )
