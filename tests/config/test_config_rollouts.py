"""Rollout policies in pipeline files: values, and requirements of the provider."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnx_ops.domain.pipeline import Deploy, Pipeline
from onnx_ops.domain.rollout_policy import (
    Guardrail,
    PlannedStep,
    RolloutPolicy,
    ServiceLevel,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import Problem
from onnx_ops.statistics.rollout.judge import describe_policy
from tests.support.golden import Golden

Load = Callable[..., Pipeline]
FindProblems = Callable[..., tuple[Problem, ...]]
PLUGINS = {"endpoints": ("local",)}
PLAIN = "{steps: [10%, 100%]}"
WHOLE = """
      strategy: shadow
      shadow: {fraction: 20%, min_requests: 400, max_differing: 2%, tolerance: 0.1%}
      steps: [10%, 30%, 100%]
      guardrails: [errors, {name: latency_p50, odds_ratio: 1.5}]
      min_requests: [300, 1000, 2000]
      slo: {error_rate: 2%}
      min_step_duration: 10 min
      step_timeout: 6h
      approval_steps: [30%]
      ab_test: {split: 50%, duration: 7 d, on_inconclusive: finish}
      scale_down_delay: 2 d"""


def test_rollout_policy_with_shadow_canary_and_ab_test_is_loaded_and_planned(
    load: Load, pipeline_text: str
) -> None:
    head, _, _ = pipeline_text.rpartition("  - {endpoint")
    text = f"{head}  - endpoint: toy\n    target: cpu-1t\n    rollout:{WHOLE}\n"
    policy = load(text).deploy[0].rollout
    assert policy == RolloutPolicy(
        strategy="shadow",
        shadow=ShadowTrial(fraction=0.2, min_requests=400, max_differing=0.02, tolerance=0.001),
        steps=(0.1, 0.3, 1.0),
        guardrails=(Guardrail(name="errors"), Guardrail(name="latency_p50", odds_ratio=1.5)),
        min_requests=(300, 1000, 2000),
        slo=ServiceLevel(error_rate=0.02),
        min_step_duration=600.0,
        step_timeout=21_600.0,
        approval_steps=(0.3,),
        ab_test=SplitTest(split=0.5, duration=604_800.0, on_inconclusive="finish"),
        scale_down_delay=172_800.0,
    )
    assert policy.planned() == (
        PlannedStep(kind="shadow", percent=0, mirror_percent=20, minimum=400),
        PlannedStep(kind="canary", percent=10, minimum=300),
        PlannedStep(kind="canary", percent=30, minimum=1000, approval=True),
        PlannedStep(kind="ab_test", percent=50, minimum=2000),
        PlannedStep(kind="full", percent=100),
    )


GUARDED = (
    "{steps: [10%, 50%, 100%], min_requests: 300, "
    "guardrails: [errors, latency_p50, latency_p99], scale_down_delay: 24h}"
)


def test_rollout_policy_with_one_request_count_applies_it_to_each_canary_step(
    load: Load, pipeline_text: str
) -> None:
    policy = load(pipeline_text.replace(PLAIN, GUARDED)).deploy[0].rollout
    assert [step.minimum for step in policy.planned()] == [300, 300, 0]


def test_rollout_policy_with_guardrails_is_analyzed_with_default_tolerances(
    load: Load, pipeline_text: str
) -> None:
    policy = load(pipeline_text.replace(PLAIN, GUARDED)).deploy[0].rollout
    assert [rail.tolerated(rail.name) for rail in policy.guardrails] == [1.0, 1.0, 1.2]
    assert policy.is_analyzed


def test_rollout_policy_without_guardrails_is_not_analyzed(load: Load) -> None:
    policy = load().deploy[0].rollout
    assert not policy.is_analyzed
    assert [step.minimum for step in policy.planned()] == [0, 0]


@pytest.mark.parametrize(
    ("rollout", "able", "found"),
    [
        (PLAIN, "split", []),
        ("{steps: [100%]}", "", []),
        (PLAIN, "", ["steps: provider 'local' cannot divide traffic; capabilities here: none"]),
        (
            "{shadow: {}}",
            "split sticky",
            [
                (
                    "shadow: provider 'local' cannot compare answers on copies of requests; "
                    "capabilities here: 'split', 'sticky'"
                )
            ],
        ),
        (
            "{ab_test: {duration: 1 d}}",
            "split",
            [
                (
                    "ab_test: provider 'local' cannot collect clients' feedback; "
                    "capabilities here: 'split'"
                ),
                (
                    "ab_test: provider 'local' cannot keep a user on one version; "
                    "capabilities here: 'split'"
                ),
            ],
        ),
        (
            "{steps: [10%, 100%], guardrails: [latency_p50, latency_p95]}",
            "split",
            [
                (
                    "guardrails: provider 'local' cannot count the requests above a given latency; "
                    "capabilities here: 'split'"
                )
            ],
        ),
        (
            "{steps: [10%, 100%], guardrails: [{name: latency, max_latency_increase: 5%}]}",
            "split exceedances",
            [],
        ),
        ("{guardrails: [{name: cold_start, max: 2 s}]}", "cold_starts", []),
        (
            "{guardrails: [{name: cold_start, max_latency_increase: 50%}]}",
            "quantiles",
            [
                (
                    "guardrails: provider 'local' cannot measure a cold start before traffic; "
                    "capabilities here: 'quantiles'"
                )
            ],
        ),
        ("{shadow: {}, ab_test: {duration: 1 d}}", "split sticky shadow feedback", []),
    ],
)
def test_rollout_policy_reports_missing_provider_capabilities(
    find_problems: FindProblems, pipeline_text: str, rollout: str, able: str, found: list[str]
) -> None:
    text = pipeline_text.replace(PLAIN, rollout)
    problems = find_problems(text, plugins=PLUGINS, capabilities=lambda _: frozenset(able.split()))
    assert all(problem.line == 20 and problem.column > 1 for problem in problems)
    assert [f"{problem.path}: {problem.message}" for problem in problems] == [
        f"deploy[0].rollout.{problem}" for problem in found
    ]


def test_deployment_whose_provider_cannot_serve_target_reports_problem(
    find_problems: FindProblems,
) -> None:
    asked: list[tuple[str, Target]] = []

    def unservable(entry: Deploy, target: Target) -> str:
        asked.append((entry.endpoint, target))
        return "no such device"

    (problem,) = find_problems(plugins=PLUGINS, unservable=unservable)
    assert (problem.line, problem.path) == (20, "deploy[0].target")
    assert (
        problem.message
        == "provider 'local' cannot serve the models of target 'cpu-1t': no such device"
    )
    assert asked == [("toy", Target(name="cpu-1t"))]


@pytest.mark.parametrize(
    ("alone", "blamed"), [("split shadow", "source 'foreign'"), ("split", "provider 'local'")]
)
def test_rollout_policy_problem_names_incapable_source_or_provider(
    find_problems: FindProblems, pipeline_text: str, alone: str, blamed: str
) -> None:
    (problem,) = find_problems(
        pipeline_text.replace(PLAIN, "{shadow: {}}, metrics: {source: foreign}"),
        plugins={**PLUGINS, "metrics": ("foreign",)},
        capabilities=lambda entry: frozenset(["split"] if entry.metrics else alone.split()),
    )
    assert problem.message.startswith(f"{blamed} cannot compare answers")


def test_describe_policy_lists_requests_each_step_needs(golden: Golden) -> None:
    policy = RolloutPolicy(
        steps=(0.1, 0.5, 1.0),
        slo=ServiceLevel(error_rate=0.02),
        guardrails=(Guardrail(name="latency_p50"),),
        shadow=ShadowTrial(),
    )
    lines = list(describe_policy(policy, frozenset()))
    golden("reasons", "\n".join(lines))
    assert len(lines) == 4
    assert list(describe_policy(policy, frozenset({"exceedances"}))) == lines[:3]
    assert not list(describe_policy(RolloutPolicy(steps=(0.1, 1.0)), frozenset()))


def test_describe_policy_with_cold_start_guardrail_does_not_mention_percentiles() -> None:
    policy = RolloutPolicy(
        steps=(0.1, 1.0), guardrails=(Guardrail(name="errors"), Guardrail(name="cold_start"))
    )
    assert not list(describe_policy(policy, frozenset()))


def test_metrics_source_that_counts_nothing_reports_only_its_own_problem(
    find_problems: FindProblems, pipeline_text: str
) -> None:
    """Without the source, the endpoint has the capabilities that the policy needs."""
    text = pipeline_text.replace(PLAIN, f"{PLAIN}, metrics: {{source: monitor}}")
    problems = find_problems(
        text,
        plugins={**PLUGINS, "metrics": ("monitor",)},
        capabilities=lambda entry: frozenset() if entry.metrics else frozenset({"split"}),
        uncounted=lambda entry: f"{entry.metrics and entry.metrics.source} counts nothing",
    )
    assert [(one.line, one.path, one.message) for one in problems] == [
        (20, "deploy[0].metrics.source", "monitor counts nothing")
    ]
