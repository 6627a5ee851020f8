"""The page on commands, followed literally in a copy of the package.

Its command runs, and passes the page's tests.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_ops.cli import main
from onnx_ops.testing.models import write_perceptron
from tests.docs.docs_blocks import ROOT, blocks_of
from tests.docs.docs_extensions import read_files, run_suite

PAGE = ROOT / "docs" / "extend-command.md"
FILES = read_files(PAGE)
PARTS = ("onnx_ops", "tests")
LINKS = ("benchmarks", "configs", "docs", "examples", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package and its tests.

    The files of the page, and its row in the table of commands, are added.
    """
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "templates")
    for name in PARTS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, path, ignore=ignore)
        else:
            shutil.copyfile(ROOT / name, path)
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    for name, text in FILES.items():
        assert not (folder / name).exists(), name
        (folder / name).write_text(text, encoding="utf-8")
    (row,) = (block for block in blocks_of(PAGE) if block.note("row of"))
    table = f"{row.note('row of')} = {{\n"
    path = folder / "onnx_ops/cli/main.py"
    source = path.read_text(encoding="utf-8")
    assert source.count(table) == 1
    path.write_text(source.replace(table, f"{table}    {row.text}\n"), encoding="utf-8")
    return folder


def run_in(folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onnx_ops.cli.main import main; main()", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


def test_command_of_page_runs_and_is_listed_in_help(copy: Path, tmp_path: Path) -> None:
    write_perceptron(tmp_path / "model.onnx")
    result = run_in(copy, "operators", "model.onnx", "--json", cwd=tmp_path)
    assert json.loads(result.stdout) == {"Gemm": 2, "Relu": 2, "MatMul": 1, "Add": 1}, result.stderr
    shown = run_in(copy, "operators", "model.onnx", cwd=tmp_path).stdout
    assert re.findall(r"^(\w+) +(\d)$", shown, re.MULTILINE)[0] == ("Gemm", "2")
    panel = run_in(copy, "--help", cwd=tmp_path).stdout.partition("Tools")[2]
    assert "Count the nodes of each operator of a model." in " ".join(panel.split())


def test_command_of_page_passes_its_test_and_gets_golden_help(copy: Path) -> None:
    (test,) = (name for name in FILES if name.startswith("tests/"))
    assert " passed" in run_suite(copy, test)
    run_suite(
        copy, "tests/cli/test_cli.py", "-k", "help_of_each_command and operators", "--regenerate"
    )
    assert "Example: onnx-ops operators model.onnx" in (copy / "tests/golden/help.txt").read_text(
        encoding="utf-8"
    )


def test_command_of_page_imports_only_light_modules_at_top() -> None:
    (module,) = (text for name, text in FILES.items() if name.startswith("onnx_ops/"))
    nodes = ast.parse(module).body
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    assert {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "typer",
        "onnx_ops.cli.common",
    }
    assert "operators" not in main._COMMANDS
