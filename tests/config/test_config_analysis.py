"""The configuration of the service of analyses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnx_ops.config.analysis import (
    AnalysisSettings,
    ErrorSelection,
    PrometheusCounters,
    bind_policy,
    load_analysis_config,
)
from onnx_ops.domain.rollout_analysis import AnalysisPolicy
from onnx_ops.domain.rollout_policy import Guardrail
from onnx_ops.errors import ConfigError, UserError

WHOLE = """\
state: s3://bucket/analyses
listen: "[::1]:8651"
analyses:
  web:
    prometheus:
      url: http://prometheus:9090
      requests: istio_requests_total
      errors: {label: response_code, regex: "5.."}
      revision_label: destination_version
      select: {reporter: source}
    guardrails: [errors, {name: latency_p99, max_latency_increase: 20%}]
    min_requests: 500
    assignment: sticky
    max_duration: 2 h
"""


SHORT = """\
state: state
analyses:
  posted: {guardrails: [errors]}
"""


def read_problems(tmp_path: Path, text: str) -> list[tuple[int, str, str]]:
    path = tmp_path / "analysis.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_analysis_config(path)
    return [(each.line, each.path, each.message) for each in raised.value.problems]


def test_load_analysis_config_of_valid_file_binds_policy(tmp_path: Path) -> None:
    path = tmp_path / "analysis.yaml"
    path.write_text(WHOLE.replace("      select:", "      histogram: seconds\n      select:"))
    config = load_analysis_config(path)
    policy = config.analyses["web"].policy
    assert policy == AnalysisPolicy(
        guardrails=(
            Guardrail(name="errors"),
            Guardrail(name="latency_p99", max_latency_increase=0.2),
        ),
        min_requests=(500,),
        assignment="sticky",
        max_duration=7200.0,
    )


@pytest.mark.parametrize(
    ("before", "after", "line", "path", "message"),
    [
        ("state: s3", "sate: s3", 1, "", "unknown key 'sate'"),
        ("url: http", "url: ftp", 6, "analyses.web.prometheus.url", "not an http address"),
        ('regex: "5.."', 'regex: "5("', 8, "analyses.web.prometheus.errors.regex", "not a regular"),
        (', regex: "5.."', "", 8, "analyses.web.prometheus.errors", "'label' needs"),
        ("label: response_code, ", "", 8, "analyses.web.prometheus.errors", "expected either"),
        ("latency_p99, max", "errors, max", 11, "analyses.web.guardrails", "named twice"),
        ("latency_p99, max_latency_increase: 20%", "cold_start", 11, "analyses.web", "cold_start"),
        ("{reporter: source}", "{}", 11, "analyses.web.guardrails", "'prometheus.histogram'"),
        ("2 h", "10 s", 5, "analyses.web.interval", "shorter than"),
        ("web:", "Web_1:", 4, "analyses", "not a name"),
    ],
)
def test_load_analysis_config_with_problem_reports_its_line(
    tmp_path: Path, before: str, after: str, line: int, path: str, message: str
) -> None:
    problems = read_problems(tmp_path, WHOLE.replace(before, after))
    assert any(
        at == line and where.startswith(path) and message in text for at, where, text in problems
    ), problems


def test_bind_policy_replaces_given_keys_and_rejects_unknown_keys() -> None:
    defaults = AnalysisSettings(min_requests=(7,), max_duration=100.0)
    policy = bind_policy({"min_requests": 50}, defaults)
    assert policy == AnalysisPolicy(min_requests=(50,), max_duration=100.0)
    with pytest.raises(UserError, match=r"policy\.guardrail: unknown key|unknown key 'guardrail'"):
        bind_policy({"guardrail": []}, defaults)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interval": "2 min"}, "shorter than 'max_duration'"),
        ({"guardrails": ["errors", "latency_p99"]}, "need 'prometheus.histogram'"),
    ],
)
def test_bind_policy_that_contradicts_its_analysis_raises_user_error(
    given: dict[str, Any], message: str
) -> None:
    source = PrometheusCounters(
        url="http://prometheus:9090",
        requests="requests_total",
        revision_label="revision",
        errors=ErrorSelection(label="code", values=("500",)),
    )
    settings = AnalysisSettings(interval=1.0, max_duration=100.0, prometheus=source)
    with pytest.raises(UserError, match=message):
        bind_policy(given, settings)


def test_bind_policy_accepts_duration_longer_than_interval_of_its_analysis() -> None:
    settings = AnalysisSettings(interval=1.0)
    assert bind_policy({"max_duration": "10 s"}, settings).max_duration == 10.0


def test_load_analysis_config_reads_keep_setting_and_rejects_less_than_one_day(
    tmp_path: Path,
) -> None:
    path = tmp_path / "analysis.yaml"
    path.write_text(SHORT)
    assert load_analysis_config(path).keep == 30 * 86_400.0
    path.write_text(f"keep: 7d\n{SHORT}")
    assert load_analysis_config(path).keep == 7 * 86_400.0
    (problem,) = read_problems(tmp_path, f"keep: 23h\n{SHORT}")
    assert problem[:2] == (1, "keep")
