"""Tests of optional dependencies.

`require` skips tests with a visible reason if a module is missing; `hide` hides a distribution from
onnx-ops. A test whose program is missing is skipped too, or fails if services are required.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import NoReturn

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


def require_programs(*programs: str, packages: str) -> None:
    """Skip the test if a program is not on the path, or fail if services are required.

    Args:
        packages: Debian packages of the programs.
    """
    if missing := [program for program in programs if shutil.which(program) is None]:
        skip_or_fail(f"no {', '.join(missing)} here (Debian: apt-get install {packages})")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail if services are required: `ONNX_OPS_TEST_SERVICES=required`."""
    if os.environ.get("ONNX_OPS_TEST_SERVICES") == "required":
        pytest.fail(f"NOT TESTED: {reason}")
    pytest.skip(f"NOT TESTED: {reason}")


def hide(monkeypatch: pytest.MonkeyPatch, *distributions: str) -> None:
    """Make onnx-ops treat distributions as not installed."""
    version = plugins.version
    monkeypatch.setattr(
        plugins, "version", lambda name: plugins.MISSING if name in distributions else version(name)
    )
