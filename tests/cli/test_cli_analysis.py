"""The commands of the service of analyses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.app.analysis_parts import KEY, open_site
from tests.support.command import clean, run_command

CONFIG = """\
state: state
listen: 127.0.0.1:0
analyses:
  posted: {guardrails: [errors]}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "analysis.yaml"
    path.write_text(CONFIG)
    return path


def test_analysis_serve_answers_until_terminated(config: Path) -> None:
    command = [sys.executable, "-m", "onnx_ops", "analysis", "serve", str(config)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean({})
    ) as process:
        try:
            assert process.stdout is not None
            url, _, rest = process.stdout.readline().partition(": ")
            assert rest == "1 analyses, state in state\n"
            document = {"stable": "a", "canary": "b"}
            answer = httpx.put(f"{url}/v1/rollouts/posted/shop", json=document, timeout=30)
            assert answer.json()["verdict"] == "inconclusive"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("listen", "what"),
    [
        ("127.0.0.1", "is not HOST:PORT"),
        ("0.0.0.0:0", "the service needs a token for an address other than loopback"),
    ],
)
def test_analysis_serve_on_invalid_address_or_public_address_without_token_exits_with_2(
    config: Path, listen: str, what: str
) -> None:
    result = run_command("analysis", "serve", config, "--listen", listen, cwd=config.parent)
    assert (result.code, what in result.stderr) == (2, True), result.stderr


def test_analysis_serve_with_invalid_file_exits_with_2_and_shows_line(config: Path) -> None:
    config.write_text(CONFIG.replace("[errors]", "[errrs]"))
    result = run_command("analysis", "serve", config, cwd=config.parent)
    assert result.code == 2
    assert "analysis.yaml:4:" in result.stderr


def test_analysis_status_lists_verdicts(tmp_path: Path) -> None:
    with open_site(tmp_path) as site:
        site.serve_traffic(2, canary=(20, 20), stable=(180, 0))
    path = tmp_path / "analysis.yaml"
    (document,) = run_command("analysis", "status", path, "--json", cwd=tmp_path).parsed()
    assert (document["rollout"], document["verdict"]) == (KEY.rollout, "fail")
    assert "fail" in run_command("analysis", "status", path, cwd=tmp_path).stdout


def test_analysis_status_without_rollouts_prints_message(config: Path) -> None:
    result = run_command("analysis", "status", config, cwd=config.parent)
    assert (result.code, result.stdout) == (0, "no rollout has recorded counts\n")
