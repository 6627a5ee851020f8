"""A shell that runs the blocks of a page one after the other, as a reader does."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.docs.docs_blocks import Command
from tests.support.processes import session_of

TIMEOUT_S = 600.0
_MARK = "--- ended with"
_OWN = ("ONNX_OPS_", "PREFECT_", "MLFLOW_")


class Shell:
    """One bash for a whole page: folders and variables last from block to block.

    Args:
        folder: where it begins.
        path: search path of commands; by default, this installation's programs come first.
        variables: further variables.
    """

    def __init__(
        self, folder: Path, *, path: str | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        environ = {name: text for name, text in os.environ.items() if not name.startswith(_OWN)}
        path = path or f"{Path(sys.executable).parent}:{environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env={**environ, "PATH": path, "COLUMNS": "110", "NO_COLOR": "1", **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, text: str) -> tuple[str, int]:
        """Return the output of a command, both streams together, and its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, os.killpg, (self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            self._process.stdin.write(
                f"{{ {text}\n}} </dev/null\nended=$?; echo; echo '{_MARK}' $ended\n"
            )
            self._process.stdin.flush()
            lines: list[str] = []
            for line in self._process.stdout:
                if line.startswith(_MARK):
                    return "".join(lines).rstrip("\n"), int(line.removeprefix(_MARK))
                lines.append(line)
        finally:
            timer.cancel()
        raise AssertionError(
            f"{text}: the shell ended, or it took longer than {TIMEOUT_S:g} s\n{''.join(lines)}"
        )

    def begin(self, text: str, log: Path) -> psutil.Process:
        """Start a command that continues to run, with its output in a file."""
        output, code = self.run(
            f"bash -c {shlex.quote(text)} </dev/null >>{shlex.quote(str(log))} 2>&1 & echo $!"
        )
        assert code == 0
        return psutil.Process(int(output))

    def close(self) -> None:
        """End the shell.

        Endpoints that its commands started have separate sessions, and continue to run.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()
        for pid in session_of(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(sign: str, log: Path, process: psutil.Process, *, may_end: bool = False) -> bool:
    """Wait until an address answers, or a text is in the log.

    Return False if the process has ended before, which `may_end` allows.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not (
        _answers(sign)
        if "://" in sign
        else sign in log.read_text(encoding="utf-8", errors="replace")
    ):
        text = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        if not process.is_running():
            assert may_end, f"it ended before {sign!r}:\n{text}"
            return False
        assert time.monotonic() < deadline, f"no {sign!r} within {TIMEOUT_S:g} s:\n{text}"
        time.sleep(0.2)
    return True


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status < 400)
    except OSError:
        return False


def outcome_of(command: Command) -> tuple[int, tuple[str, ...]]:
    """Return the exit code that a page shows (0 if none), and the output without it."""
    shown = command.shown or ()
    if shown and (ended := re.fullmatch(r"exit (\d+)", shown[-1])):
        return int(ended[1]), shown[:-1]
    return 0, shown


def without_figures(line: str) -> str:
    """Return a line without values that differ between machines.

    These are numbers, times and the widths of tables.
    """
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,e:+T-]*", "0", line)).strip()


def without_ports(line: str) -> str:
    """Return a line with its numbers, but without the port that the system chose."""
    return re.sub(r"\s+", " ", re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", line)).strip()


def missing(
    shown: tuple[str, ...], output: str, plain: Callable[[str], str] = without_figures
) -> list[str]:
    """Return the lines that a page shows and a command did not print.

    The lines must occur in this order. `plain` is applied to both texts. `…` in a line stands for
    any text, and a line `…` for any lines.
    """
    printed = [plain(line) for line in output.splitlines()]
    lost, begin = [], 0
    for line in shown:
        if line.strip(" …"):
            pattern = ".*".join(re.escape(part) for part in plain(line).split("…"))
            found = next(
                (i for i in range(begin, len(printed)) if re.fullmatch(pattern, printed[i])), None
            )
            lost += [line] if found is None else []
            begin = begin if found is None else found + 1
    return lost
