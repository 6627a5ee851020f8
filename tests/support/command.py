"""The command line within this process.

It has the same entry point, streams, folder and environment as the console script. Tests of
arguments, outputs and exit codes use it, because a new process spends a second on imports. Signals,
imported modules and the like are tested with a real process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from onnx_ops.cli.main import main

PROGRAM = Path(sys.executable).with_name("onnx-ops")
WIDTH = "80"
"""Columns of the output if there is no terminal."""

_SETTINGS = (
    *("ONNX_OPS_", "MLFLOW_", "PREFECT_"),
    *("GITHUB_BASE_", "CI_MERGE_REQUEST_", "SYSTEM_PULLREQUEST_"),
)
_MADE_ONCE = {
    "onnx_ops.app.context": ("load_tool",),
    "onnx_ops.adapters.azure": ("get_credential",),
    "onnx_ops.adapters.endpoints.azureml_client": ("_ml_client",),
}
"""Functions that cache values for one project or one identity, by module."""


@dataclass(frozen=True, slots=True)
class Result:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def parsed(self, code: int = 0) -> Any:
        """Return the parsed output of a command, after a check of its exit code."""
        assert self.code == code, f"exit {self.code}\n{self.stdout}\n{self.stderr}"
        return json.loads(self.stdout)

    def document(self) -> dict[str, Any]:
        """Return the parsed output of a command with `--json`.

        Its field `exit_code` must equal the exit code.
        """
        found: dict[str, Any] = json.loads(self.stdout)
        assert found["exit_code"] == self.code
        return found


def run_command(
    *arguments: str | Path, cwd: Path, environ: Mapping[str, str] | None = None
) -> Result:
    """Run `onnx-ops` with these arguments.

    Args:
        cwd: folder in which the command runs.
        environ: variables beside those of this process. Variables of onnx-ops in this process are
            not passed on.
    """
    words = ["onnx-ops", *map(str, arguments)]
    given = clean(environ or {})
    folders = [folder for folder in given.get("PYTHONPATH", "").split(os.pathsep) if folder]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with ExitStack() as stack:
            stack.enter_context(_place(cwd, given))
            stack.enter_context(_streams(out.fileno(), err.fileno()))
            stack.enter_context(_warnings())
            stack.enter_context(patch.multiple(sys, argv=words, path=[*folders, *sys.path]))
            stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
            # click takes the program's name from `__main__`.
            sys.modules["__main__"] = ModuleType("__main__")
            code = _call()
        for file in (out, err):
            file.seek(0)
        return Result(code, out.read().decode(), err.read().decode())


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command.

    It consists of `environ` and of variables of this process. Settings of onnx-ops and its
    services are removed from the latter, and so is the pull request of a CI service.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return {**kept, "COLUMNS": WIDTH, **environ}


def _call() -> int:
    """Return the exit code with which the interpreter would end."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def _place(cwd: Path, environ: Mapping[str, str]) -> Iterator[None]:
    before, outer = Path.cwd(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _forget()
    try:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(cwd)
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(outer)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _forget()


@contextmanager
def _warnings() -> Iterator[None]:
    """Use the interpreter's default warning filters.

    Warnings that other packages emit during their import must not fail a command.
    """
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield


def _forget() -> None:
    for module, names in _MADE_ONCE.items():
        if module in sys.modules:
            for name in names:
                getattr(sys.modules[module], name).cache_clear()


@contextmanager
def _streams(out: int, err: int) -> Iterator[None]:
    """Replace standard output and error by files, and standard input by an empty one.

    C libraries and child processes use the two files too.
    """
    kept = (os.dup(1), os.dup(2))
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        with (
            open(os.devnull, encoding="utf-8") as stdin,
            open(1, "w", encoding="utf-8", closefd=False) as stdout,
            open(
                2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
            ) as stderr,
            patch.multiple(
                sys, stdin=stdin, stdout=stdout, stderr=stderr, __stdout__=stdout, __stderr__=stderr
            ),
        ):
            yield
    finally:
        for place, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, place)
            os.close(descriptor)
