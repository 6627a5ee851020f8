"""The command of an interpreter that sees this package and nothing else of this installation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from pathlib import Path

from onnx_ops.errors import NotFoundError

PACKAGE = "onnx_ops"

Command = Callable[[Path, int, int], list[str]]
"""Given a scratch folder, the descriptor for answers, and bytes of memory: what to start."""


def interpreter(python: Path, module: str, packages: Collection[str] = ()) -> Command:
    """Runs `main()` of a module of this package, with its environment, the standard library and `packages` beside.

    Args:
        python: the interpreter.
        module: dotted name.
        packages: further top-level packages or modules of this installation that it may import.
    """
    code = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main()"

    def command(scratch: Path, answers: int, memory: int) -> list[str]:
        visible = scratch / "packages"
        visible.mkdir()
        for name in {PACKAGE, *packages}:
            path = _place(name)
            (visible / (name if path.is_dir() else path.name)).symlink_to(path)
        return [str(python), "-I", "-c", code, str(visible), str(answers), str(memory)]

    return command


def _place(name: str) -> Path:
    """The folder or file of a top-level package or module of this installation."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NotFoundError(f"package {name} has no file", remedy="An isolated exporter must be a module or a package.")
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path
