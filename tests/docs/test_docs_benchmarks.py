"""The pages that benchmarks write begin with the texts of these benchmarks."""

from __future__ import annotations

import pytest

from benchmarks import sklearn_estimators, tables
from tests.docs.docs_blocks import ROOT


@pytest.mark.parametrize(
    ("page", "head"),
    [("sklearn-estimators", sklearn_estimators.HEAD), ("tables-cases", tables.HEAD)],
)
def test_page_of_benchmark_begins_with_its_head(page: str, head: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").startswith(head)


def test_shorten_of_long_message_cuts_between_words() -> None:
    message = "convert this\nmodel|file " * 20
    shortened = sklearn_estimators.shorten(message)
    assert len(shortened) <= 300
    assert shortened.endswith(" …")
    assert set(shortened.split()) == {"convert", "this", "model/file", "…"}
