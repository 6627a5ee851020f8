"""Packages that import their public names at first use."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest


def list_typed_names(path: Path) -> set[str]:
    """Return the names imported below `if TYPE_CHECKING`, as a type checker does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )
    return {
        alias.asname
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


@pytest.mark.parametrize("name", ["onnx_ops", "onnx_ops.ports"])
def test_public_names_of_package_are_those_of_type_checker(name: str) -> None:
    package = import_module(name)
    assert package.__file__
    typed = list_typed_names(Path(package.__file__))
    assert typed
    assert all(getattr(package, public) is not None for public in typed)
    public = {one for one in dir(package) if one[0] != "_" and one not in vars(package)}
    assert public <= typed
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = package.missing
