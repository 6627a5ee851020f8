"""Pages on extensions, followed literally.

Their files are written, installed, and tested by their own suites.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.docs.docs_blocks import ROOT, blocks_of

_PUBLIC = ("onnx_ops.domain.", "onnx_ops.errors", "onnx_ops.ports", "onnx_ops.testing.")
"""Modules whose members every plug-in uses."""


def read_files(*pages: Path) -> dict[str, str]:
    """Return the texts of the files that pages show, by their names."""
    return {
        name: f"{block.text}\n"
        for page in pages
        for block in blocks_of(page)
        if (name := block.note("file"))
    }


def install_extension(pages: Sequence[Path], folder: Path) -> None:
    """Write the files and the metadata of pages into `folder`.

    The metadata is what `pip install .` would write.
    """
    files = read_files(*pages)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    points = [
        f"[{group}]\n{name} = {value}\n"
        for group, entries in project["entry-points"].items()
        for name, value in entries.items()
    ]
    (metadata / "entry_points.txt").write_text("".join(points), encoding="utf-8")


def run_suite(folder: Path, *arguments: str) -> str:
    """Run tests of a page in a separate process; return its output.

    The tests must pass.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    result = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def find_undocumented(text: str) -> set[str]:
    """Return the functions of onnx_ops that a plug-in uses without documentation.

    `ports.md` lists the documented functions.
    """
    used = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("onnx_ops.")
        for alias in node.names
    }
    return {name for name in used - _list_members() if not name.startswith(_PUBLIC)}


def _list_members() -> set[str]:
    page = (ROOT / "docs" / "ports.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^::: (\S+)\n    options:\n((?:      .*\n)+)", page, re.MULTILINE)
    options = {module: yaml.safe_load(text) for module, text in blocks}
    return {
        f"{module}.{name}"
        for module, values in options.items()
        for name in values.get("members", ())
    }
