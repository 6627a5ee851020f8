"""Progress: which step is at work, and how long those that are known still take."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from onnx_ops.cli.progress import Durations, StepProgress, TerminalProgress, working
from onnx_ops.domain.pipeline import Plan, Stage, StageKind, StageOutcome, StageStatus


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("onnx_ops.cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return now


def shown(clock: list[float], steps: list[str], seconds: list[float]) -> list[str]:
    """Lines at the end of each step."""
    console = Console(file=io.StringIO(), force_terminal=True)
    durations = Durations(console)
    one, lines = StepProgress(console, durations, "test ", steps), []
    for step, taken in zip(steps, seconds, strict=True):
        one.begin(step)
        clock[0] += taken
        lines.append(one.line())
    one.end()
    durations.save()
    return lines


def test_time_left_is_what_the_steps_took_the_last_time(clock: list[float]) -> None:
    steps = ["registry", "endpoints"]
    assert shown(clock, steps, [10, 20]) == ["[1/2] registry … 10 s", "[2/2] endpoints … 20 s"]
    assert shown(clock, steps, [4, 5]) == [
        "[1/2] registry … 4 s, about 26 s left",
        "[2/2] endpoints … 5 s, about 15 s left",
    ]


def test_a_damaged_file_of_durations_is_none(clock: list[float], tmp_path: Path) -> None:
    shown(clock, ["a"], [10])
    (tmp_path / "onnx-ops" / "durations.json").write_text("{")
    assert shown(clock, ["a"], [1]) == ["a … 1 s"]


def test_without_a_terminal_only_what_takes_long_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with working("test", "first", "second") as work:
        work.begin("second")
        work.print_lines()
        work.plan(["third"])
        work.begin("third")
    assert capsys.readouterr().err == "[2/2] second …\n[3/3] third …\n"
    with working("test", "first"):
        pass
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.iterdir())


def test_without_a_terminal_each_stage_begins_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    console = Console(file=io.StringIO(), width=80)
    progress = TerminalProgress(console)
    stages = tuple(Stage(id=name, kind=StageKind(name), settings={}) for name in ("train", "export"))
    progress.planned(Plan(pipeline="digits", stages=stages))
    for stage in stages:
        progress.started(stage)
        progress.finished(stage, StageOutcome(stage=stage.id, status=StageStatus.DONE))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["[1/2]", "train"],
        ["✓", "train"],
        ["[2/2]", "export"],
        ["✓", "export"],
    ]
