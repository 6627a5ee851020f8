"""Progress: the present step, and the remaining time if durations are known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from onnx_ops.cli.progress import StepProgress, read_durations, working
from onnx_ops.cli.run_progress import RunProgress
from onnx_ops.cli.tools import show_progress
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome, StageStatus


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("onnx_ops.cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return now


def shown(clock: list[float], steps: list[str], seconds: list[float]) -> list[str]:
    """Return the line at the end of each step."""
    console = Console(file=io.StringIO(), force_terminal=True)
    durations = read_durations(console)
    one, lines = StepProgress(console, durations, "test ", steps), []
    for step, taken in zip(steps, seconds, strict=True):
        one.begin(step)
        clock[0] += taken
        lines.append(one.line())
    one.end()
    durations.save()
    return lines


def test_step_progress_with_known_durations_shows_time_left(clock: list[float]) -> None:
    steps = ["registry", "endpoints"]
    assert shown(clock, steps, [10, 20]) == ["[1/2] registry … 10 s", "[2/2] endpoints … 20 s"]
    assert shown(clock, steps, [4, 5]) == [
        "[1/2] registry … 4 s, about 26 s left",
        "[2/2] endpoints … 5 s, about 15 s left",
    ]


def test_step_progress_of_user_without_home_shows_no_time_left(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", raise_error)
    for _ in range(2):
        assert shown(clock, ["a"], [10]) == ["a … 10 s"]


def test_step_progress_with_damaged_durations_shows_no_time_left(
    clock: list[float], tmp_path: Path
) -> None:
    shown(clock, ["a"], [10])
    (tmp_path / "onnx-ops" / "durations.json").write_text("{")
    assert shown(clock, ["a"], [1]) == ["a … 1 s"]


def test_working_without_terminal_prints_steps_only_after_print_lines(
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


def stage_of(kind: StageKind, name: str, *needs: str) -> Stage:
    return Stage(id=name, kind=kind, settings={}, needs=needs)


def run_side_by_side(console: Console, clock: list[float], jobs: int = 2) -> list[str]:
    """Return the lines while stages run.

    Two stages of 10 s and 20 s run side by side. One stage of 5 s waits for both.
    """
    stages = (
        stage_of(StageKind.QUANTIZE, "quantize/a"),
        stage_of(StageKind.QUANTIZE, "quantize/b"),
        stage_of(StageKind.GATE, "gate", "quantize/a", "quantize/b"),
    )
    progress, lines = RunProgress(console, jobs=jobs), []
    progress.planned(Plan(pipeline="p", stages=stages))

    def end(stage: Stage, seconds: float) -> None:
        clock[0] += seconds
        lines.append(progress._progress.line())
        outcome = StageOutcome(stage=stage.id, status=StageStatus.DONE, seconds=seconds)
        progress.finished(stage, outcome)

    progress.started(stages[0])
    progress.started(stages[1])
    end(stages[0], 10)
    end(stages[1], 10)
    progress.started(stages[2])
    end(stages[2], 5)
    return lines


def test_run_progress_of_concurrent_stages_shows_them_in_one_line_with_time_left(
    clock: list[float],
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert run_side_by_side(console, clock) == [
        "[0/3 done] quantize/a, quantize/b …",
        "[2/3] quantize/b … 20 s",
        "[3/3] gate … 5 s",
    ]
    assert run_side_by_side(console, clock)[:2] == [
        "[0/3 done, about 15 s left] quantize/a, quantize/b …",
        "[2/3] quantize/b … 20 s, about 5 s left",
    ]
    assert run_side_by_side(console, clock, jobs=3)[0] == "[0/3 done] quantize/a, quantize/b …"


def test_step_progress_with_parallel_jobs_divides_time_left(clock: list[float]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    shown(clock, ["a", "b", "c"], [10, 10, 10])
    progress = StepProgress(console, read_durations(console), "test ", ["a", "b", "c"], jobs=2)
    progress.start("a")
    progress.start("b")
    assert progress.line() == "[0/3 done, about 15 s left] a, b …"
    progress.end()


def test_run_progress_of_concurrent_stages_without_terminal_prints_lines(
    clock: list[float], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=80)
    run_side_by_side(console, clock)
    assert isinstance(console.file, io.StringIO)
    assert [" ".join(line.split()) for line in console.file.getvalue().splitlines()] == [
        "p: 3 stages",
        "[1/3] quantize/a …",
        "[0/3 done] quantize/a, quantize/b …",
        "✓ quantize/a 10.0 s",
        "✓ quantize/b 10.0 s",
        "[3/3] gate …",
        "✓ gate 5.0 s",
    ]
    assert not list(tmp_path.iterdir())


def test_show_progress_without_terminal_omits_immediate_repetition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("judge", "a.onnx", quiet=False) as report:
        for text in ("reading", "reading", "timing", "reading"):
            report(text)
    assert capsys.readouterr().err.splitlines() == ["reading", "timing", "reading"]
