"""The snippets of the page on rollouts of other programs.

The tests check their schemas and their effects.
"""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from onnx_ops.protocol.analysis import FLAGGER_HOOKS
from tests.app.argo_rollouts import ArgoMetric
from tests.docs.docs_analysis import MAX_LINES, find_check
from tests.docs.docs_blocks import ROOT, blocks_of

BLOCKS = [block for block in blocks_of(ROOT / "docs" / "analysis.md") if block.language == "yaml"]
SNIPPETS = [yaml.safe_load(block.text) for block in BLOCKS]
(TEMPLATE,) = (each for each in SNIPPETS if each.get("kind") == "AnalysisTemplate")
(FLAGGER,) = (each["analysis"] for each in SNIPPETS if "analysis" in each)
(METRIC,) = TEMPLATE["spec"]["metrics"]
OLDER = {key: value for key, value in METRIC.items() if key != "consecutiveSuccessLimit"}


def make_answer(verdict: str, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={"verdict": verdict})


def end(metric: dict[str, Any], *answers: httpx.Response) -> str | None:
    """Return the end of an analysis in which the last answer is repeated."""
    argo, left = ArgoMetric(metric), list(answers)
    while (phase := argo.assess()) is None:
        argo.measure(left.pop(0) if len(left) > 1 else left[0])
    return phase


def test_snippets_of_other_programs_have_few_lines() -> None:
    lines = [
        len(block.text.splitlines())
        for block, snippet in zip(BLOCKS, SNIPPETS, strict=True)
        if find_check(snippet) is not None
    ]
    assert len(lines) == 3
    assert max(lines) <= MAX_LINES


def test_find_check_of_snippet_with_misspelled_key_raises_validation_error() -> None:
    check = find_check(TEMPLATE)
    assert check is not None
    metric = {**METRIC, "inconclusivLimit": 3}
    document = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "metrics": [metric]}}
    with pytest.raises(jsonschema.ValidationError, match="inconclusivLimit"):
        check(document)


@pytest.mark.parametrize("metric", [METRIC, OLDER], ids=["1.8", "older"])
def test_argo_snippet_promotes_only_after_pass(metric: dict[str, Any]) -> None:
    hold = make_answer("inconclusive")
    assert end(metric, hold) == "Inconclusive"
    assert end(metric, hold, make_answer("pass")) == "Successful"
    assert end(metric, hold, make_answer("fail"), make_answer("pass")) == "Failed"
    assert end(metric, make_answer("pass", 503)) == "Error"
    errors = [make_answer("", 503)] * 20
    assert end(metric, *errors, hold) == "Inconclusive"


def test_flagger_snippet_webhook_urls_end_with_their_types() -> None:
    for webhook in FLAGGER["webhooks"]:
        assert webhook["type"] in FLAGGER_HOOKS
        assert webhook["url"].endswith(f"/v1/flagger/shop/{webhook['type']}")
    assert {each["type"] for each in FLAGGER["webhooks"]} >= {"confirm-promotion", "rollback"}
