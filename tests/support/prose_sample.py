"""Draw public docstrings and sentences of docs, help and messages at random, to be read one by one.

python -m tests.support.prose_sample --seed 7 --count 100
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SHORTEST = 5
"""Words of the shortest text that counts as a sentence."""


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield place and text of every public docstring of the package."""
    for path, tree in _modules():
        for node in ast.walk(tree):
            name = getattr(node, "name", "module")
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and not name.startswith("_"):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}", text


def sentences() -> Iterator[tuple[str, str]]:
    """Yield place and text of every sentence of the docs, and of every text that the program shows."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        prose = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for part in re.split(r"\n\n|\n(?=[-|#])", prose):
            for sentence in re.split(r"(?<=[.?!])\s+", " ".join(part.strip("-|#* ").split())):
                if len(sentence.split()) >= _SHORTEST:
                    yield str(page.relative_to(ROOT)), sentence
    for path, tree in _modules():
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = _shown(node) if id(node) not in documentation else ""
            if len(text.split()) >= _SHORTEST:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def _shown(node: ast.AST) -> str:
    """Return a text in a call, its parts that are computed as `…`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        return node.value if re.match(r"[A-Za-z`']", node.value) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return "".join(parts).replace("\n", " ")
    return ""


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "onnx_ops").rglob("*.py")):
        if "templates" not in path.parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def main() -> None:
    """Print the drawn texts with their places and the seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=100, help="texts of each kind")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)  # noqa: S311 (a sample, no secret)
    sys.stdout.write(f"seed {arguments.seed}\n")
    for kind, found in (("docstrings", docstrings()), ("sentences", sentences())):
        texts = sorted(set(found))
        sys.stdout.write(f"\n== {arguments.count} of {len(texts)} {kind}\n")
        for number, (place, text) in enumerate(generator.sample(texts, arguments.count), start=1):
            sys.stdout.write(f"\n{number}. {place}\n   {text}\n")


if __name__ == "__main__":
    main()
