"""Exit codes and standard output of commands, tested without processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.core import TyperGroup

from onnx_ops.cli import endpoints, rollouts
from onnx_ops.cli.common import exit_after_steps, handle_errors, print_json
from onnx_ops.cli.main import build_app
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.release.reconcile import StepReport
from tests.release.release_scenes import begun, serving
from tests.support.command import run_command

QUIET = StepReport(endpoint="digits", did="", why="nothing to do", stable=True)
REFUSED = StepReport(endpoint="digits", did="refused", why="it failed", stable=True, refused=True)
SILENT = StepReport(endpoint="digits", did="", why="waits", stable=True, registry_down="no answer")


@pytest.mark.parametrize(
    ("steps", "code"),
    [([REFUSED, QUIET], 5), ([SILENT], 4), ([REFUSED, SILENT], 5), ([SILENT, QUIET], 0)],
)
def test_exit_after_steps_exits_with_5_if_refused_and_4_if_registry_is_down_at_last_step(
    steps: list[StepReport], code: int
) -> None:
    if not code:
        exit_after_steps({"digits": steps, "letters": [QUIET]})
        return
    with pytest.raises(typer.Exit) as ended:
        exit_after_steps({"letters": [QUIET], "digits": steps})
    assert ended.value.exit_code == code


def test_exit_after_steps_with_errors_exits_with_highest_code_of_errors() -> None:
    errors = {"a": UserError("no such endpoint"), "b": ServiceUnavailableError("no answer")}
    with pytest.raises(typer.Exit) as ended:
        exit_after_steps({"digits": [REFUSED]}, errors)
    assert ended.value.exit_code == 4


@pytest.mark.parametrize(
    ("kind", "message"), [("train", "executes no stage before the gates"), ("gate", "no such file")]
)
def test_run_with_take_over_refuses_no_cache_only_for_stages_before_gates(
    tmp_path: Path, kind: str, message: str
) -> None:
    arguments = ("x.yaml", "--take-over", "folder", "--no-cache", kind)
    done = run_command("run", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert message in done.stderr


def test_rollout_status_watch_of_rollout_aborted_meanwhile_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = begun()
    monkeypatch.setattr(rollouts, "time", SimpleNamespace(sleep=lambda pause_s: scene.abort()))
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    with pytest.raises(typer.Exit) as ended:
        rollouts.rollout_status("digits", watch=True, interval="1s")
    assert ended.value.exit_code == 1
    assert "last change of the version: abort: " in " ".join(capfd.readouterr().out.split())


def test_rollout_status_of_earlier_aborted_rollout_exits_with_1_only_with_watch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that starts to watch late must not take the rollback for success."""
    scene = begun()
    scene.abort()
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    rollouts.rollout_status("digits")
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as ended:
            rollouts.rollout_status("digits", watch=True, as_json=as_json)
        assert ended.value.exit_code == 1
    assert capfd.readouterr().out.splitlines()[-1] == "null"


def test_rollout_status_after_first_deployment_mentions_no_ended_rollout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = serving("a")
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    rollouts.rollout_status("digits")
    assert " ".join(capfd.readouterr().out.split()) == (
        "digits: no rollout in progress; last change of the version: first-deployment: "
        "the first deployment gets 100 % of traffic immediately"
    )


def test_status_of_endpoint_without_supervisor_exits_with_4(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = begun()
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    monkeypatch.setattr(type(scene.world.provider), "is_unsupervised", lambda *_: True)
    scene.world.provider.down = True
    with pytest.raises(typer.Exit) as ended:
        endpoints.status()
    assert ended.value.exit_code == 4
    assert "has no supervisor" in capfd.readouterr().out


def test_status_of_endpoint_of_other_state_folder_explains_it_and_suggests_no_restart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = begun()
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    monkeypatch.setattr(
        type(scene.world.provider), "explain_elsewhere", lambda *_: "its folder does not exist"
    )
    scene.world.provider.down = True
    with pytest.raises(typer.Exit) as ended:
        endpoints.status()
    assert ended.value.exit_code == 4
    shown = " ".join(capfd.readouterr().out.split())
    assert "does not answer here: its folder does not exist" in shown
    assert "starts it again" not in shown


def test_handle_errors_with_json_output_redirects_library_output_to_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    @handle_errors
    def command(*, as_json: bool) -> None:
        sys.stdout.write("a library's greeting\n")
        print_json({"answer": 42})

    command(as_json=True)
    output = capfd.readouterr()
    assert json.loads(output.out) == {"answer": 42}
    assert "greeting" in output.err
    command(as_json=False)
    assert "greeting" in capfd.readouterr().out


def test_unexpected_exception_of_command_in_group_names_group_and_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    groups = [name for name, command in app.commands.items() if isinstance(command, TyperGroup)]
    assert "ledger" in groups
    for group in groups:

        def fail() -> None:
            raise AssertionError

        fail.__name__ = f"{group}_verb"
        with pytest.raises(typer.Exit):
            handle_errors(fail)()
        assert f"onnx-ops {group} verb" in capsys.readouterr().err
