"""Processes that answer one request at a time.

Requests and answers are JSON lines. Arrays are in separate files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

from onnx_ops.adapters.isolation.worker_main import dump, load
from onnx_ops.adapters.retry import wait_until
from onnx_ops.errors import NotFoundError, StageError, describe_exit, from_document
from onnx_ops.scratch import Scratch

DEFAULT_TIMEOUT_S = 1800.0
"""Default seconds for an answer; only `env.timeout` limits training."""
GRACE_S = 5.0
"""Seconds within which a process must end after a request to end.

After its time-out, a process has the same time to print where it hangs.
"""

_STEP_S = 0.005

_NOT_INHERITED = (
    "KERAS_BACKEND",
    "PIP_PREFIX",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONHOME",
    "PYTHONPATH",
    "UV_PROJECT",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process.

    `memory` is in bytes, by default the machine's memory. `timeout` is in seconds per answer.
    """

    memory: int | None = None
    timeout: float | None = None


def read_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class IsolatedProcess:
    """One process and its children, in a separate process group.

    The process reads requests from standard input, and writes answers to the given descriptor. It
    must end when its standard input is closed, and should respect the memory limit. Each request
    contains its time-out. `where` is the stage, section or target that errors show, and
    `late_remedy` is the remedy for a request that takes too long.
    """

    copy_output: ClassVar[Callable[[bytes], object] | None] = None
    """Function that receives the output of all isolated processes.

    The process of a stage sets this function.
    """

    def __init__(
        self,
        command: Command,
        limits: ProcessLimits,
        where: str,
        *,
        late_remedy: str = "Increase `env.timeout` if the work takes that long.",
    ) -> None:
        self._where = where
        self._late_remedy = late_remedy
        self._is_limited = limits.memory is not None
        self._memory = limits.memory or read_memory_bytes()
        self._scratch = Scratch()
        answers, inner = os.pipe()
        self._process = subprocess.Popen(
            command(self._scratch.path, inner, self._memory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(inner,),
            env={**build_clean_environ(), "TMPDIR": str(self._scratch.path)},
            cwd=self._scratch.path,
            start_new_session=True,
        )
        os.close(inner)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._tail = OutputTail(self._process.stdout, on_output=type(self).copy_output)  # type: ignore[arg-type]
        self._end = weakref.finalize(self, _end, self._process, self._answers, self._scratch)

    @property
    def alive(self) -> bool:
        """Whether the process can take another request."""
        return self._end.alive and self._process.poll() is None

    @property
    def folder(self) -> Path:
        """Folder that both processes can read and write.

        Raises:
            StageError: the process was stopped.
        """
        if not self._end.alive:
            raise StageError(
                "the process has already ended", where=self._where, remedy="Load the model again."
            )
        return self._scratch.path

    @contextlib.contextmanager
    def shared_folder(self) -> Iterator[Path]:
        """Create a folder for both processes, and remove it afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)

    def ask(self, do: str, *, timeout: float | None = None, **arguments: object) -> Any:
        """Send one request and return the answer.

        Values of this package's types are returned as plain JSON values.

        Raises:
            ValueError: the called method refuses its inputs.
            OnnxOpsError: the called method raised this error. StageError also means that the method
                raised another exception, or that the process crashed, exceeded its memory limit, or
                took longer than `timeout`.
        """
        with self.shared_folder() as folder:
            request = dump(
                {"do": do, "timeout": timeout, "scratch": str(folder), **arguments}, folder
            )
            answer = load(self._exchange(request.encode(), do, timeout))
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "error" in answer:
            raise from_document(answer["error"])
        return answer["done"]

    def _exchange(self, request: bytes, do: str, timeout: float | None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):
            # If the process has ended, the write raises BrokenPipeError; reading the answer below
            # reports the end.
            self._process.stdin.write(request + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        received = b""
        while not received.endswith(b"\n"):
            left = None if deadline is None else max(0.0, deadline + GRACE_S - time.monotonic())
            ready, _, _ = select.select([self._answers], [], [], left)
            part = self._answers.read(1 << 16) if ready else None
            if not part:
                self._fail(
                    do, timeout if deadline is not None and time.monotonic() >= deadline else None
                )
            received += part
        return received

    def stop(self) -> None:
        """End the process and its children."""
        self._end()

    def _fail(self, do: str, late_after: float | None) -> NoReturn:
        """Stop the process, and raise the error for its missing answer.

        If `late_after` is set, the process exceeded this time limit in seconds. Otherwise, it ended
        or closed its answer pipe.
        """
        if late_after is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code, output = self._process.poll(), self._tail.summary()
        self.stop()
        if late_after is not None:
            raise StageError(
                f"the process took longer than {late_after:g} s to {do} and was stopped",
                where=self._where,
                why=output,
                remedy=self._late_remedy,
            )
        more = "Increase `env.memory`" if self._is_limited else "Use a machine with more memory"
        how = "closed its answer pipe" if code is None else f"ended with {describe_exit(code)}"
        raise StageError(
            f"the process {how} before it could {do}",
            where=self._where,
            why=output or "the process printed nothing",
            remedy=f"{more} if the process needs more than {self._memory / 1e9:.1f} GB, "
            "or set another version of a package in `requirements`.",
        )


def _end(process: subprocess.Popen[bytes], answers: Any, scratch: Scratch) -> None:
    """Request the end of the process; then kill the rest of its process group.

    After the request, a process can close what it has opened, such as a browser.
    """
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    if process.returncode is None:
        # WNOWAIT keeps the exit code, so that no other process gets the number of the group.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            wait_until(
                lambda: os.waitid(os.P_PID, process.pid, flags) is not None, GRACE_S, _STEP_S
            )
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    answers.close()

    def is_removed() -> bool:
        shutil.rmtree(scratch.path, ignore_errors=True)
        return not scratch.path.exists()

    # Processes of other groups can still write into the folder.
    if wait_until(is_removed, GRACE_S, _STEP_S):
        scratch.remove()


PACKAGE = "onnx_ops"

Command = Callable[[Path, int, int], list[str]]
"""Function that returns the command of a process.

Its arguments are a scratch folder, the descriptor for answers, and the memory limit in bytes.
"""


def build_interpreter_command(python: Path, entry: str, packages: Collection[str] = ()) -> Command:
    """Return a builder of the command that calls `entry` in an environment.

    `entry` is `module:function`. The command can import this package and `packages`, which are
    top-level packages or modules of this installation.

    Raises:
        NotFoundError: one of the packages is not installed, or is a namespace package. The returned
            function raises this error.
    """
    module, _, function = entry.partition(":")
    code = (
        f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import {function}; "
        f"{function}()"
    )

    def command(scratch: Path, answers: int, memory: int) -> list[str]:
        visible = scratch / "packages"
        visible.mkdir()
        for name in {PACKAGE, *packages}:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise NotFoundError(
                    f"package {name} is not installed",
                    where=sys.executable,
                    remedy="Install the package in the environment of onnx-ops.",
                )
            if spec.origin is None:
                raise NotFoundError(
                    f"package {name} is a namespace package",
                    where=sys.executable,
                    why="it has no `__init__.py`",
                    remedy="Add an `__init__.py` to its folder.",
                )
            path = Path(spec.origin)
            if path.name == "__init__.py":
                (visible / name).symlink_to(path.parent)
            else:
                (visible / path.name).symlink_to(path)
        return [str(python), "-I", "-c", code, str(visible), str(answers), str(memory)]

    return command


KEPT_BYTES = 1 << 16
LAST_LINES = 30
_LONGEST_LINE = 400
_CHUNK = 1 << 16
_MUCH = 1_000_000
_UNREAD_S = 2.0
"""Seconds for which a summary waits for unread output."""


class OutputTail:
    """Thread that reads a stream to its end and stores the last 64 KiB.

    With `on_progress`, lines that begin with `mark` are passed to this function without the mark.
    Other lines are passed to `on_output`.
    """

    def __init__(
        self,
        stream: IO[bytes],
        mark: bytes = b"",
        on_progress: Callable[[str], None] | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        self._total = 0
        self._kept = b""
        self._mark = mark
        self._on_progress = on_progress
        self._on_output = on_output
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, args=(stream,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait up to two seconds until the stream has been read to its end.

        A child that outlives the process can keep the stream open.
        """
        self._thread.join(_UNREAD_S)

    def summary(self) -> str:
        """Return the last lines, and the amount of output if it exceeds 1 MB."""
        self.join()
        with self._lock:
            text, total = select_last_lines(self._kept), self._total
        return f"{text}\n({total / 1e6:.0f} MB of output in all)" if total > _MUCH else text

    def _drain(self, stream: IO[bytes]) -> None:
        rest = b""
        with stream:
            while chunk := stream.read1(_CHUNK):  # type: ignore[attr-defined]
                if self._on_progress is None:
                    self._keep(chunk)
                    continue
                *lines, rest = (rest + chunk).split(b"\n")
                for line in [line for line in lines if line.startswith(self._mark)]:
                    self._on_progress(
                        line.removeprefix(self._mark).decode("utf-8", errors="replace")
                    )
                self._keep(
                    b"".join(line + b"\n" for line in lines if not line.startswith(self._mark))
                )
                if len(rest) > KEPT_BYTES:
                    # A line this long cannot be a progress line, so it is passed through.
                    self._keep(rest)
                    rest = b""
        self._keep(rest)

    def _keep(self, output: bytes) -> None:
        if output and self._on_output is not None:
            self._on_output(output)
        with self._lock:
            self._total += len(output)
            self._kept = (self._kept + output)[-KEPT_BYTES:]


def select_last_lines(output: bytes) -> str:
    """Return the last 30 lines of an output, each with at most 400 characters."""
    lines = output[-KEPT_BYTES:].decode("utf-8", errors="replace").splitlines()
    return "\n".join(line[:_LONGEST_LINE] for line in lines[-LAST_LINES:])


@dataclass(slots=True)
class RetainedProcess:
    """Storage of at most one running process.

    Two processes would compete for the cores.
    """

    _kept: tuple[str, IsolatedProcess] | None = None

    def get(self, key: str, start: Callable[[], IsolatedProcess]) -> IsolatedProcess:
        """Return the running process of the key; start a new process if necessary."""
        if self._kept is not None:
            key_of_process, process = self._kept
            if key_of_process == key and process.alive:
                return process
            self.stop()
        process = start()
        self._kept = key, process
        return process

    def stop(self) -> None:
        """End the process."""
        if self._kept is not None:
            self._kept[1].stop()
            self._kept = None


def build_clean_environ() -> dict[str, str]:
    """Return the environment variables without `_NOT_INHERITED`."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
