"""Stored texts: their comparison, and the removal of texts of deleted tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import golden
from tests.support.golden import FOLDER, Golden, plain, read, without_figures, write
from tests.support.processes import ROOT

SURFACES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("surface", SURFACES)
def test_golden_texts_belong_to_existing_tests(surface: str) -> None:
    known: dict[str, set[str]] = {}
    for name in read(surface):
        file, *words = name.split("[")[0].split(" ")[0].split("::")
        if file not in known:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            known[file] = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
        assert known[file].issuperset(words), (
            f"{name}: no such test; pytest {file} --regenerate removes its text"
        )


def test_golden_read_returns_written_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    texts = {"tests/a.py::test_a[x y]": "one\n\n    two\n# three", "tests/a.py::test_b": ""}
    write("some", texts)
    assert read("some") == texts


@pytest.mark.parametrize("text", ["new", ""])
def test_golden_with_other_text_fails_with_diff_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    write("some", {"tests/a.py::test_a": "old"})
    with pytest.raises(pytest.fail.Exception) as failed:
        Golden("tests/a.py::test_a", None)("some", text)
    assert {"-old", "pytest tests/a.py --regenerate"} <= {
        line.rpartition("with: ")[2] for line in str(failed.value).splitlines()
    }


def test_plain_and_without_figures_remove_varying_parts() -> None:
    assert plain("\x1b[1ma\x1b[0m  \n/tmp/x/b", {"/tmp/x": "FOLDER"}) == "a\nFOLDER/b"  # noqa: S108 (a text)
    assert (
        without_figures("p50   1.5e-3 ms ┏━━━━┓ cpu-1t [0.1, 12]") == "p50 # ms ┏━┓ cpu-#t [#, #]"
    )
