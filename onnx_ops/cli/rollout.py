"""`onnx-ops rollout`: look at a rollout, and say what becomes of it."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import Actor, AsJson, Reason, duration, print_json, reported
from onnx_ops.cli.steps import exit_for, tell_steps
from onnx_ops.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from onnx_ops.ports import Ports
    from onnx_ops.release.status import RolloutView


class RolloutWord(StrEnum):
    """What can be said about a rollout."""

    STATUS = "status"
    RESUME = "resume"
    PAUSE = "pause"
    ABORT = "abort"


@reported
def rollout(
    word: Annotated[RolloutWord, typer.Argument(help="status, resume (next step), pause, or abort (traffic back).")],
    endpoint: Annotated[str, typer.Argument(help="Name of the endpoint.")],
    reason: Reason = "",
    actor: Actor = "",
    watch: Annotated[bool, typer.Option("--watch", help="With status: show it until it ends.")] = False,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Time between two updates of --watch.")
    ] = "2s",
    as_json: AsJson = False,
) -> None:
    """Show, pause, resume or abort a rollout in progress.

    `status` shows the steps, the metrics and what it waits for. It moves nothing: the reconciler does
    (`onnx-ops reconcile --watch`). Exit code of `status --watch`: 1 if the candidate was rolled back.

    Example: onnx-ops rollout status digits-cnn --watch

    Example: onnx-ops rollout resume digits-cnn
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.domain.rollout import OperatorCommand
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.reconcile import reconcile_until_stable
    from onnx_ops.release.rollback import roll_back_each, send_command

    ports = open_project().ports
    if word is RolloutWord.STATUS:
        _status(ports, endpoint, watch=watch, every=every, as_json=as_json)
        return
    if watch:
        raise UserError("--watch goes with status", remedy=f"onnx-ops rollout status {endpoint} --watch")
    if word is RolloutWord.ABORT:
        _, errors = roll_back_each(ports, (endpoint,), reason=reason, actor=actor, candidate_only=True)
        for error in errors.values():
            raise error
    else:
        ports.registry()  # that it can be asked is known before the word is recorded
        spoken = OperatorCommand.ADVANCE if word is RolloutWord.RESUME else OperatorCommand.PAUSE
        send_command(ports, endpoint, spoken, reason=reason, actor=actor)
    reports = reconcile_until_stable(ports, endpoint, actor=actor)
    send_pending_each(ports, (endpoint,))
    if as_json:
        print_json(codec.to_json(reports))
    else:
        tell_steps({endpoint: reports})
    exit_for({endpoint: reports})


def _status(ports: Ports, endpoint: str, *, watch: bool, every: str, as_json: bool) -> None:
    from onnx_ops.release.status import read_rollout_view

    pause_s = duration(every, "--every")
    seen = read_rollout_view(ports, endpoint)
    if not watch or seen is None:
        if as_json:
            print_json(codec.to_json(seen))
        else:
            _print(_ended(ports, endpoint)[0] if seen is None else _shown(seen))
        return
    _follow(ports, seen, pause_s, as_json=as_json)
    told, bad = _ended(ports, endpoint)
    if not as_json:
        _print(told)
    if bad:
        raise typer.Exit(1)


def _follow(ports: Ports, seen: RolloutView | None, pause_s: float, *, as_json: bool) -> None:
    """Show the rollout until it ends: in place on a terminal, as lines of JSON, or what is new where neither is."""
    from rich.live import Live

    from onnx_ops.release.status import read_rollout_view

    live = Live(console=_console(), auto_refresh=False) if sys.stdout.isatty() and not as_json else None
    last = ""
    try:
        if live is not None:
            live.start()
        while seen is not None:
            if live is not None:
                live.update(_shown(seen), refresh=True)
            elif as_json:
                print_json(codec.to_json(seen))
            elif seen.next != last:
                _print(_shown(seen))
            last = seen.next
            time.sleep(pause_s)
            seen = read_rollout_view(ports, seen.endpoint)
    finally:
        if live is not None:
            live.stop()


def _shown(seen: RolloutView) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    marks = [
        f"[bold]{escape(_step(step))}[/bold]" if index == seen.step else escape(_step(step))
        for index, step in enumerate(seen.steps)
    ]
    head = f"[bold]{escape(seen.endpoint)}[/bold] {escape(seen.stable)} -> {escape(seen.candidate)}"
    lines = [f"{head}: {' → '.join(marks)}, here for {seen.seconds:.0f} s"]
    if seen.judged is not None:
        lines += [f"  {escape(guard.line)}" for guard in seen.judged.guards]
        lines += [f"  {escape(line)}" for line in (seen.judged.outcome_line, seen.judged.mismatch) if line]
    lines.append(f"  {escape(seen.next)}")
    return Group(*(Text.from_markup(line, emoji=False) for line in lines))


def _step(step: Any) -> str:
    return f"shadow {step.copied} %" if step.kind == "shadow" else f"{step.percent} %"


def _ended(ports: Ports, endpoint: str) -> tuple[str, bool]:
    """How the last rollout ended, in one line, and whether the candidate was rolled back."""
    from rich.markup import escape

    from onnx_ops.domain.ledger import Intent
    from onnx_ops.domain.rollout import ActionKind

    ends = (ActionKind.FINISH, ActionKind.ABORT, ActionKind.ROLLBACK, ActionKind.FIRST)
    found = [e.body.action for e in ports.ledger.read(endpoint) if isinstance(e.body, Intent)]
    last = next((action for action in reversed(found) if action.kind in ends), None)
    if last is None:
        return f"{escape(endpoint)}: no rollout yet", False
    told = f"{escape(endpoint)}: no rollout in progress; the last one ended with {last.kind.value}: {escape(last.why)}"
    return told, last.kind in (ActionKind.ABORT, ActionKind.ROLLBACK)


def _console() -> Any:
    from onnx_ops.cli.terminal import console

    return console()


def _print(shown: RenderableType) -> None:
    _console().print(shown)
