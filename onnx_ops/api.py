"""The commands as Python functions, for notebooks and scripts.

    import onnx_ops

    result = onnx_ops.judge("fp32.onnx", "int8.onnx", data={"x": rows}, labels=y, metric="accuracy")
    result["verdict"]           # the document that the command prints with --json
    result.exit_code            # its exit code: 0 pass, 1 fail, 3 inconclusive …
    result                      # in a notebook: the command's screen

Files, endpoints and settings are those of the project around the working directory. A command that
cannot be executed raises one of `onnx_ops.errors`, with place, cause and remedy. A failed gate
or stage, a problem that `check` finds, or an endpoint that does not answer `status`, only sets the
exit code. Progress is printed on standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Result", "check", "judge", "promote", "rollback", "run", "status"]


class Result:
    """Result of a command: its document, its exit code, and its terminal output.

    `document` is the document that --json prints. `screen` is the terminal output with ANSI colors.
    `result[key]`, `len(result)` and iteration apply to the document.
    """

    def __init__(self, document: Any, exit_code: int, screen: str) -> None:
        self.document, self.exit_code, self.screen = document, exit_code, screen

    def __getitem__(self, key: Any) -> Any:
        return self.document[key]

    def __len__(self) -> int:
        return len(self.document)

    def __iter__(self) -> Any:
        return iter(self.document)

    def __repr__(self) -> str:
        from rich.text import Text

        return Text.from_ansi(self.screen).plain

    def _repr_html_(self) -> str:
        from rich.console import Console
        from rich.text import Text

        page = Console(record=True, file=io.StringIO(), width=1000, force_jupyter=False)
        page.print(Text.from_ansi(self.screen), soft_wrap=True)
        code = page.export_html(inline_styles=True, code_format="{code}")
        return f'<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


def judge(
    baseline: str | Path,
    candidate: str | Path | None = None,
    *,
    data: str | Path | Mapping[str, ArrayLike] | None = None,
    labels: str | ArrayLike | None = None,
    metric: str | None = None,
    max_drop: str = "1%",
    max_regression: str | None = None,
    targets: Sequence[str] = ("cpu-1t",),
    batch: Sequence[int] = (1,),
    fix: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Judge whether one ONNX file may replace another; `onnx-ops judge`.

    Args:
        baseline: The model in use: a file, folder, `models:/NAME/VERSION` or URL.
        candidate: The model that is to replace it. With `system="package.module:predict"` and
            `files=Path(…)`, the first model is the candidate, and your own code the baseline.
        data: Rows: a file or folder, or arrays by input name, whose first axis counts rows. By
            default, rows are generated.
        labels: Name of the labels' array in `data`. If `data` contains arrays, also the labels
            themselves, one per row.
        metric: accuracy, f1, auc, mae, rmse, cosine … or `package.module:function`. By default, the
            kind of labels determines it.
        max_drop: Largest permitted loss of the metric: points, or a share of the baseline's error.
        max_regression: Largest permitted slowdown. By default, 5 % of latency and throughput, 20 %
            of the cold start, and 10 % of the memory.
        targets: Names of targets to measure on.
        batch: Numbers of rows of one request; each is measured.
        fix: Values of inputs that are the same in every run, such as `{"sr": 16000}`.
        quiet: Show no progress.
        options: Further options of the command, such as `dims`, `cold_start`, `only`, `rows`,
            `seed`, `html`.

    Raises:
        UserError: a file or an option is wrong.
        MissingPackageError: a package that the judgement needs is not installed.
        ServiceUnavailableError: a model cannot be read from its server now.
    """
    from onnx_ops.cli.judge import judge as command
    from onnx_ops.scratch import Scratch

    with contextlib.ExitStack() as stack:
        if isinstance(data, Mapping):
            import numpy as np

            arrays = {name: np.asarray(array) for name, array in data.items()}
            if labels is not None and not isinstance(labels, str):
                name = "labels"
                while name in arrays:  # An input of the model can have this name.
                    name += "_"
                arrays[name], labels = np.asarray(labels), name
            data = stack.enter_context(Scratch()) / "rows.npz"
            np.savez(data, allow_pickle=False, **arrays)
        return _call(
            command,
            str(baseline),
            None if candidate is None else str(candidate),
            data=Path(data) if data is not None else None,
            labels=labels,
            metric=metric,
            max_drop=max_drop,
            max_regression=max_regression,
            targets=list(targets),
            batch=",".join(str(size) for size in batch),
            fix=[f"{name}={json.dumps(value)}" for name, value in (fix or {}).items()],
            quiet=quiet,
            **options,
        )


def check(*files: str | Path, overrides: Sequence[str] = ()) -> Result:
    """Validate pipeline files without running them; `onnx-ops check`.

    Problems in the files raise no exception: the document lists the problems. If the only file
    cannot be read, the document describes this error. In both cases, the exit code is 2. It is 4 if
    this machine is the cause of all problems, for example because a package is missing.
    """
    from onnx_ops.cli.pipelines import check as command
    from onnx_ops.errors import UserError

    try:
        return _call(command, [Path(file) for file in files], overrides=list(overrides))
    except UserError as error:
        return Result(error.as_document(), error.exit_code, f"{error}\n")


def run(
    *files: str | Path, overrides: Sequence[str] = (), quiet: bool = False, **options: Any
) -> Result:
    """Run pipelines from training to deployment; `onnx-ops run`.

    Unchanged stages are skipped (cached). If there are several files, the document contains the
    error of each file that cannot be run.

    Args:
        files: Pipeline files.
        overrides: Values to replace, such as `train.with.seed=3`.
        quiet: Show no progress.
        options: Further options of the command, such as `until`, `no_cache`, `jobs`, `abandon`.

    Raises:
        ConfigError: the only file is invalid; the error lists all of its problems.
        UserError: the only file cannot be read, or an option is wrong.
        MissingPackageError: a package that a stage of the only file needs is not installed.
        RefusedError: an endpoint would continue to run without a pipeline, and `abandon` is empty.
        ValueError: `until` or `no_cache` names an unknown kind of stage.
    """
    from onnx_ops.cli.pipelines import run as command
    from onnx_ops.domain.plan import StageKind

    if "until" in options:
        options["until"] = StageKind(options["until"])
    if "no_cache" in options:
        options["no_cache"] = [StageKind(kind) for kind in options["no_cache"]]
    return _call(
        command, [Path(file) for file in files], overrides=list(overrides), quiet=quiet, **options
    )


def status(*endpoints: str, model: str = "", target: str = "") -> Result:
    """Return one document per endpoint with what it serves; `onnx-ops status`.

    Without names, all endpoints are shown. `model` and `target` select among the endpoints. This
    function does not read MLflow.

    Raises:
        NotFoundError: there is no such endpoint.
    """
    from onnx_ops.cli.endpoints import status as command

    return _call(command, list(endpoints), model=model, target=target)


def promote(
    model: str,
    version: str | int,
    *,
    target: str,
    reason: str = "",
    actor: str = "",
    override: bool = False,
) -> Result:
    """Make a version the challenger of a target; `onnx-ops promote`.

    The rollout starts on every endpoint that serves the model on the target. The reconciler
    continues the rollout. Without such an endpoint, the version becomes the champion immediately.

    Args:
        model: Registered model.
        version: Version of the model.
        target: Name of the target, e.g. cpu-1t.
        reason: Recorded in the registry, unless the version serves already. An override requires
            the reason, and the ledger records it too.
        actor: User recorded in the ledger; user@host by default.
        override: Override failed gates or a previous rollback.

    Raises:
        RefusedError: the version lacks a passing decision or was rolled back before, or no key on
            this machine can sign an override.
        NotFoundError: the version does not exist.
        UserError: the override has no reason.
        ConflictError: another process is changing an endpoint.
        InfrastructureError: the registry or an endpoint failed or was silent, or no key on this
            machine can sign a ledger entry.
    """
    from onnx_ops.cli.releases import promote as command

    return _call(
        command,
        f"{model}/{version}",
        target,
        reason=reason,
        actor=actor,
        override=override,
        changes=True,
    )


def rollback(
    *endpoints: str,
    reason: str,
    to: str | int | None = None,
    model: str = "",
    target: str = "",
    actor: str = "",
    force: bool = False,
) -> Result:
    """Move all traffic to the previous version immediately; `onnx-ops rollback`.

    Repeating a completed rollback raises no exception.

    Args:
        endpoints: Names of endpoints. Without names, `model` is required. Then the endpoints of
            the model that serve its latest release are rolled back. If `to` is set, all endpoints
            of the model are rolled back.
        reason: Recorded in the ledger.
        to: Version to roll back to. By default, the stable version during a rollout, and otherwise
            the previous version.
        model: Registered model.
        target: Select only endpoints on this target.
        actor: User recorded in the ledger; user@host by default.
        force: Allow rolling back to a version that was itself rolled back before, and rolling back
            further after a rollback.

    Raises:
        RefusedError: the version to roll back to was itself rolled back before, and `force` is not
            set; or the endpoint is being deleted.
        StillPendingError: the rollback could not be completed, and is repeated in the background.
        NotFoundError: the endpoint, or the version to roll back to, is missing.
        UserError: endpoints are given together with a model or target, or neither endpoints nor a
            model is given.
    """
    from onnx_ops.cli.rollouts import rollback as command

    return _call(
        command,
        list(endpoints),
        to=None if to is None else str(to),
        reason=reason,
        model=model,
        target=target,
        actor=actor,
        force=force,
        all_=not endpoints,
        changes=True,
    )


def _call(
    command: Callable[..., None], *arguments: Any, changes: bool = False, **options: Any
) -> Result:
    """Call a command as the command line would, and collect its output.

    With `changes`, the command's error with the highest exit code is raised, with the terminal
    output as a note.
    """
    import typer

    from onnx_ops.cli.common import CollectedOutput, collected_output
    from onnx_ops.scratch import storage_errors

    collected, screen, code = CollectedOutput(), io.StringIO(), 0
    reset = collected_output.set(collected)
    try:
        with contextlib.redirect_stdout(screen), storage_errors():
            command(*arguments, **options)
    except typer.Exit as ended:
        code = ended.exit_code
    finally:
        collected_output.reset(reset)
    result = Result(collected.document, code, screen.getvalue())
    if changes and collected.errors:
        worst = max(collected.errors, key=lambda error: error.exit_code)
        worst.add_note(repr(result))
        raise worst
    return result
