"""Draw texts of the project at random, for reading.

The texts are docstrings, comments, messages, sentences of the docs and names of tests.

    python -m tests.support.prose_sample --seed 7 --count 60
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SHORTEST = 5
"""Fewest words of a text that counts as a sentence."""
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")

Texts = Iterator[tuple[str, str]]
"""Places and texts."""


def list_docstrings() -> Texts:
    """Yield every docstring of the package.

    Private docstrings and those of attributes are included.
    """
    for path, text in _list_modules("onnx_ops"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _read_docstrings(path, node)


def _read_docstrings(
    path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Texts:
    """Yield the docstring of a definition, and those of its attributes."""
    if own := ast.get_docstring(node):
        yield f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}", own
    if isinstance(node, ast.Module | ast.ClassDef):
        for assigned, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(assigned, ast.Assign | ast.AnnAssign) and is_text:
                yield (
                    f"{path}:{assigned.lineno} {ast.unparse(assigned)[:60]}",
                    ast.literal_eval(below.value),  # type: ignore[attr-defined]
                )


def list_comments() -> Texts:
    """Yield every comment of package, tests and benchmarks.

    Consecutive lines are one comment.
    """
    for path, text in _list_modules("onnx_ops", "tests", "benchmarks", "flows"):
        parts: list[str] = []
        last = start = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
                continue
            if parts and token.start[0] != last + 1:
                yield f"{path}:{start}", " ".join(parts)
                parts = []
            start = start if parts else token.start[0]
            parts.append(token.string.lstrip("# "))
            last = token.start[0]
        if parts:
            yield f"{path}:{start}", " ".join(parts)


def list_messages() -> Texts:
    """Yield every text that the program can show."""
    for path, text in _list_modules("onnx_ops"):
        tree = ast.parse(text)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            shown = _read_message(node) if id(node) not in documentation else ""
            if len(shown.split()) >= _SHORTEST:
                yield f"{path}:{getattr(node, 'lineno', 1)}", shown


def _read_message(node: ast.AST) -> str:
    """Return a text in a call, with `…` for computed parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        return node.value if re.match(r"[A-Za-z`']", node.value) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return "".join(parts).replace("\n", " ")
    return ""


def list_sentences() -> Texts:
    """Yield every sentence of the docs."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        prose = re.sub(
            r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        for part in re.split(r"\n\n|\n(?=[-|#])", prose):
            for sentence in re.split(r"(?<=[.?!])\s+", " ".join(part.strip("-|#* ").split())):
                if len(sentence.split()) >= _SHORTEST:
                    yield str(page.relative_to(ROOT)), sentence


def list_test_names() -> Texts:
    """Yield the name of every test, the conformance suites included."""
    for path, text in _list_modules("tests", "onnx_ops/testing"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                yield f"{path}:{node.lineno}", node.name


KINDS: Mapping[str, Callable[[], Texts]] = {
    "docstrings": list_docstrings,
    "comments": list_comments,
    "messages": list_messages,
    "sentences": list_sentences,
    "test names": list_test_names,
}


def _list_modules(*folders: str) -> Texts:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "templates" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def main() -> None:
    """Print the drawn texts with their places and the seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=60, help="texts of each kind (60)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="kinds of texts (all)")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)  # noqa: S311 (a sample, no secret)
    sys.stdout.write(f"seed {arguments.seed}\n")
    for kind in arguments.kind or KINDS:
        texts = sorted(set(KINDS[kind]()))
        sys.stdout.write(f"\n== {arguments.count} of {len(texts)} {kind}\n")
        for number, (place, text) in enumerate(generator.sample(texts, arguments.count), start=1):
            sys.stdout.write(f"\n{number}. {place}\n   {text}\n")


if __name__ == "__main__":
    main()
