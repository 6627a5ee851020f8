"""The pages on runtimes, followed literally.

Their runtime is installed, tested by its suite, and used by a command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops import plugins
from onnx_ops.config.targets import TargetFiles
from onnx_ops.ports import Runtime
from onnx_ops.testing.models import write_perceptron
from tests.docs.docs_blocks import ROOT
from tests.docs.docs_extensions import find_undocumented, install_extension, read_files, run_suite
from tests.support.command import run_command

PAGES = (ROOT / "docs" / "extend-runtime.md", ROOT / "docs" / "extend-runtime-sessions.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a project in whose environment the runtime of the pages is installed."""
    install_extension(PAGES, tmp_path)
    (tmp_path / "onnx-ops.toml").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("extra_runtime", "extra_sessions"):
        sys.modules.pop(name, None)


def test_runtime_of_page_passes_conformance_suite(folder: Path) -> None:
    assert " passed" in run_suite(folder, "test_extra_runtime.py")


def test_runtime_of_page_is_loaded_by_name_in_target(folder: Path) -> None:
    target = TargetFiles(folder).load("reference")
    runtime = plugins.load("runtimes", target.runtime)
    assert isinstance(runtime, Runtime)
    write_perceptron(folder / "model.onnx")
    facts = runtime.facts(folder / "model.onnx", target)
    assert (facts.runtime, facts.nodes) == ("reference", {"CPUExecutionProvider": 6})


def test_bench_on_target_of_page_times_model(folder: Path) -> None:
    write_perceptron(folder / "model.onnx")
    arguments = ("model.onnx", "--target", "reference", "--runs", "20", "--json")
    document = run_command("bench", *arguments, cwd=folder).parsed()
    assert document["target"] == "reference"
    assert document["metrics"]["p50"]["value"] > 0


def test_runtime_of_page_imports_only_functions_documented_on_ports_page() -> None:
    files = read_files(*PAGES)
    assert find_undocumented(files["extra_runtime.py"]) == set()
    assert find_undocumented(files["extra_sessions.py"]) == set()
