"""The pages that benchmarks write begin with the texts of these benchmarks."""

from __future__ import annotations

import importlib

import pytest

from tests.docs.docs_blocks import ROOT


@pytest.mark.parametrize(
    ("page", "benchmark"),
    [("sklearn-estimators", "sklearn_estimators"), ("tables-cases", "tables")],
)
def test_page_of_benchmark_begins_with_its_head(page: str, benchmark: str) -> None:
    head = importlib.import_module(f"benchmarks.{benchmark}").HEAD
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").startswith(head)


def test_shorten_of_long_message_cuts_between_words() -> None:
    from benchmarks import sklearn_estimators

    message = "convert this\nmodel|file " * 20
    shortened = sklearn_estimators.shorten(message)
    assert len(shortened) <= 300
    assert shortened.endswith(" …")
    assert set(shortened.split()) == {"convert", "this", "model/file", "…"}
