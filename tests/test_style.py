"""Rules about names and words that no linter has."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METAPHORS = {
    "bell",
    "crew",
    "crown",
    "glance",
    "hands",
    "heats",
    "herald",
    "reign",
    "twin",
    "workshop",
}
"""Metaphors in place of mechanisms: name the mechanism."""
VAGUE = {"owed", "owing", "patience", "said", "spoken", "tell", "telling", "tells", "told", "wish"}
"""Words that hide the value of a name: name the value."""
SDK_PARTS = {"adapters", "console", "integrations", "orchestration", "serving"}
"""Parts of the package that import SDKs, or that have a separate contract."""
_RIDDLES = re.compile(r"\b(nobody|owed|somebody|surely|tells?|told|whoever)\b", re.IGNORECASE)


@cache
def parse_modules() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "onnx_ops").rglob("*.py"))
        if "templates" not in path.parts
    }


def test_class_names_are_unique_in_package() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in parse_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_identifiers_contain_no_metaphors_or_vague_words() -> None:
    found = []
    for path, tree in parse_modules().items():
        names = {path.stem}
        for node in ast.walk(tree):
            match node:
                case (
                    ast.ClassDef(name=name)
                    | ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.arg(arg=name)
                    | ast.Name(id=name)
                ):
                    names.add(name)
                case _:
                    pass
        for name in names:
            words = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
            found += [f"{path.relative_to(ROOT)}: {name}"] if words & (METAPHORS | VAGUE) else []
    assert sorted(found) == []


def test_docs_and_docstrings_contain_no_vague_words() -> None:
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (ROOT / "docs").rglob("*.md")
    }
    for path, tree in parse_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                texts[place] = ast.get_docstring(node) or ""
    assert (
        sorted(f"{place}: {m[0]}" for place, text in texts.items() if (m := _RIDDLES.search(text)))
        == []
    )


def test_exception_names_in_errors_module_end_in_error() -> None:
    tree = parse_modules()[ROOT / "onnx_ops" / "errors.py"]
    names = [
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Problem"
    ]
    assert [name for name in names if not name.endswith("Error")] == []


def test_docstrings_contain_no_placeholders() -> None:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for path, tree in parse_modules().items()
        for node in ast.walk(tree)
        if isinstance(node, nodes)
        and re.search(r"\b(TODO|FIXME|XXX)\b", ast.get_docstring(node) or "")
    ]
    assert found == []


def test_import_contract_of_sdks_lists_each_part_that_imports_no_sdk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (listed,) = (
        contract["source_modules"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == "SDKs live in adapters"
    )
    parts = {path.relative_to(ROOT / "onnx_ops").parts[0] for path in parse_modules()}
    names = {part.removesuffix(".py") for part in parts} - {"__init__"}
    assert {f"onnx_ops.{name}" for name in names - SDK_PARTS} == set(listed)
