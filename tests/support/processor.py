"""The present processor, and an emulated x86 without VNNI, whose int8 saturates.

    python -m tests.support.processor [ARGUMENTS OF PYTEST]

runs the tests with the marker `processor` on an emulated Haswell, which has AVX2 and neither
AVX-512 nor VNNI (program qemu-x86_64 of Debian's and Ubuntu's package qemu-user). The emulator has
no AVX-512, so VNNI can only be tested on a processor that has it. Programs that a test starts run
on the real processor.

This is also a pytest plugin, loaded by `tests/conftest.py`. With `--emulated`, onnx-ops uses the
features of the emulated processor, because `/proc/cpuinfo` shows those of the real one.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest

from onnx_ops.domain.arithmetic import Arithmetic, detect_arithmetic
from onnx_ops.domain.target import HardwareFingerprint, Target
from tests.support.processes import ROOT

EMULATOR = "qemu-x86_64"

_FEATURES = frozenset({"avx", "avx2", "f16c", "fma", "sse4_1", "sse4_2"})
"""Features of a Haswell among those that select ONNX Runtime's kernels."""

_MODEL = "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid"
"""Processor of the emulator; features that qemu cannot emulate are switched off.

With them each thread would print warnings into the output of tests.
"""

_HERE = Target(name="here")

_ENVIRONMENT = {"NPY_DISABLE_CPU_FEATURES": "X86_V3"}
"""Variables that disable NumPy's AVX2 sorts.

These sorts crash in the emulator (qemu 7.2). ONNX Runtime's kernels are not affected.
"""


@functools.cache
def detect_here() -> Arithmetic:
    """Return the arithmetic of the present processor."""
    return detect_arithmetic(_read_here(), _HERE)


def saturates_here() -> bool:
    """Return whether int8 products saturate on the present processor.

    `detect_here` also reports saturation for processors older than AVX2, whose products do not
    saturate. The reason is that a pool's machines may have more features than the pool names.
    """
    return detect_here().saturates and "avx2" in _read_here().cpu_flags


def _read_here() -> HardwareFingerprint:
    # Few tests need ONNX Runtime, which is slow to import.
    from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime

    return OnnxRuntime().fingerprint(_HERE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated",
        action="store_true",
        help="this process runs on an emulated processor without VNNI",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "processor: true on x86 with and without VNNI; runs on an emulated one as well"
    )
    if config.option.emulated:
        # The processor is replaced before the tests are collected, because some tests read the
        # processor when they are imported.
        features = patch("onnx_ops.adapters.runtimes.hardware._cpu", lambda: ("Haswell", _FEATURES))
        features.start()
        config.add_cleanup(features.stop)


def main() -> int:
    """Run the marked tests on an emulated processor; return the exit code of pytest."""
    if problem := _find_problem():
        sys.stderr.write(f"The tests of the emulated processor were NOT RUN: {problem}\n")
        return int(os.environ.get("ONNX_OPS_TEST_SERVICES") == "required")
    files = sorted(
        str(file)
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.processor" in file.read_text()
    )
    command = [
        EMULATOR,
        "-cpu",
        _MODEL,
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "processor",
        "--emulated",
        *files,
    ]
    return subprocess.run(
        [*command, *sys.argv[1:]], cwd=ROOT, env=os.environ | _ENVIRONMENT, check=False
    ).returncode


def _find_problem() -> str:
    """Return why the emulator cannot run; empty if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"they need an x86-64 machine, and this one is {platform.machine()}."
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is missing. On Debian and Ubuntu: apt-get install qemu-user"
    return ""


if __name__ == "__main__":
    sys.exit(main())
