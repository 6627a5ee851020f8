"""Execution of stages: in this process, in a child process, or on a pool's worker."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from onnx_ops.adapters.isolation.process import OutputTail
from onnx_ops.app.fork_server import FORK_SERVER
from onnx_ops.app.placement import ask
from onnx_ops.app.running_stages import RunningStages, machine_lock
from onnx_ops.app.stage_request import build_request
from onnx_ops.config.settings import Settings, to_environ
from onnx_ops.domain.artifact import Digest, Manifest, hex_digits
from onnx_ops.domain.plan import Plan, Stage, StageKind
from onnx_ops.errors import StageError, describe_exit, from_document
from onnx_ops.pipeline.stage_settings import get_pool
from onnx_ops.pipeline.stages import execute
from onnx_ops.pipeline.stages.champion import attach_champion
from onnx_ops.ports import Context, Observer
from onnx_ops.printable import show
from onnx_ops.scratch import Durations, Scratch

PROGRESS = b"\x1eprogress "
"""Prefix of a line of a child's output that reports the progress of its stage."""

_TIMED = (StageKind.SEARCH, StageKind.BENCHMARK)
"""Kinds of stages that measure times: one such stage runs on a machine at a time."""


_WAIT = "waiting for other work on this machine"

_MOST_OUTPUT_BYTES = 64 << 20
"""Size in bytes from which no more output of a stage is written to its file."""

_MOST_OUTPUT_FILES = 200


class StageOutput:
    """File with the output of a stage's code, created when the code first prints.

    Args:
        file: path of the file; the file of an earlier execution is replaced.
        stage: the stage whose code prints the output.
        observer: receives the last line of each output.
    """

    def __init__(self, file: Path, stage: Stage, observer: Observer) -> None:
        self.file, self._stage, self._observer = file, stage, observer
        self._written = 0

    def write(self, output: bytes) -> None:
        """Append output to the file, and show its last line.

        Output beyond `_MOST_OUTPUT_BYTES` is only shown.
        """
        # Errors of writing the file are ignored. If the disk is full, the stage itself reports the
        # error.
        with contextlib.suppress(OSError):
            if not self._written:
                self.file.parent.mkdir(parents=True, exist_ok=True)
            if self._written < _MOST_OUTPUT_BYTES:
                with self.file.open("ab" if self._written else "wb") as stream:
                    stream.write(output)
            self._written += len(output)
        lines = output.decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
        if line := next((line.strip() for line in reversed(lines) if line.strip()), ""):
            self._observer.printed(self._stage, show(line), self.file)

    @property
    def place(self) -> str:
        """Sentence for a message that names the file; empty if nothing was printed."""
        return f" The output of the stage is in {self.file}." if self._written else ""

    def remove_old(self) -> None:
        """Remove all but the newest `_MOST_OUTPUT_FILES` output files in this folder."""
        with contextlib.suppress(OSError):
            files = sorted(self.file.parent.glob("*.log"), key=lambda path: path.stat().st_mtime)
            for old in files[:-_MOST_OUTPUT_FILES]:
                old.unlink(missing_ok=True)


_PRELOADED = {"scikit-learn": "sklearn", "skl2onnx": "skl2onnx"}
"""Packages that the fork server imports for the stages that need them.

The keys are the names of distributions. These packages start no Python threads.
"""


@dataclass(frozen=True)
class StageExecutor:
    """Executor of stages in this process, in a child process, or on a pool's worker.

    A child process is used if the stage requests it or has a time-out. Executors that run
    concurrently must share `running`.
    """

    settings: Settings
    context: Context
    no_cache: Collection[StageKind] = ()
    """Kinds of stages whose result is computed anew, even if a pool's worker has it."""
    observer: Observer = field(default_factory=Observer)
    plan: Plan | None = None
    running: RunningStages = field(default_factory=RunningStages)
    durations: Durations = field(default_factory=Durations)

    def __call__(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Execute a stage, on a worker of its pool if the stage has a pool."""
        if self.running.ended:
            raise StageError(
                "the run was cancelled", where=stage.id, remedy="Run the pipeline again."
            )
        self._prepare(stage)
        if get_pool(stage):
            renew, place = stage.kind in self.no_cache, self.settings.store
            self.observer.progressed(stage, f"waiting for a worker of pool {get_pool(stage)}")
            took = partial(self._record, stage)
            return ask(
                self.running.pools,
                self.context,
                stage,
                key,
                inputs,
                place=place,
                renew=renew,
                took=took,
            )
        wait = partial(self.observer.progressed, stage, _WAIT)
        if not stage.own_process and stage.timeout is None:
            with self.running.lock.hold(alone=False, on_wait=wait), self._measure(stage):
                return execute(stage, key, inputs, self.context)
        if stage.kind not in _TIMED:
            with self.running.lock.hold(alone=False, on_wait=wait), self._measure(stage):
                return run_in_subprocess(
                    self.settings, stage, key, inputs, self.observer, self.running
                )
        self.running.wait_until_prepared()
        prepared = (
            attach_champion(stage, self.context) if stage.kind is StageKind.BENCHMARK else stage
        )
        with (
            self.running.lock.hold(alone=True, on_wait=wait),
            machine_lock(wait),
            self._measure(stage),
        ):
            return run_in_subprocess(
                self.settings, prepared, key, inputs, self.observer, self.running
            )

    def _prepare(self, stage: Stage) -> None:
        """Start the imports that stages of the plan need, in the background."""
        if self.plan is None:
            return
        here = [one for one in self.plan.stages if one.own_process and not get_pool(one)]
        tools = {tool for one in here for tool in one.tools}
        FORK_SERVER.start([package for tool, package in _PRELOADED.items() if tool in tools])
        if stage.own_process and any(one.kind is StageKind.REGISTER for one in self.plan.stages):
            self.running.import_registry()

    @contextlib.contextmanager
    def _measure(self, stage: Stage) -> Iterator[None]:
        """Measure the time of a stage's work, without the time spent waiting before."""
        begun = time.monotonic()
        try:
            with self.durations.measure(stage.id):
                yield
        finally:
            self.observer.worked(stage, time.monotonic() - begun)

    def _record(self, stage: Stage, seconds: float) -> None:
        """Record the seconds that a pool's worker spent on a stage."""
        self.durations.record(stage.id, seconds)
        self.observer.worked(stage, seconds)


def _find_output_file(settings: Settings, stage: Stage, key: Digest) -> Path:
    """Return the path of a stage's output file, which is the same for the same key."""
    name = stage.id.replace("/", "-").replace("@", "-").replace("#", "-")
    return settings.state / "output" / f"{name}-{hex_digits(key)[:8]}.log"


def run_in_subprocess(
    settings: Settings,
    stage: Stage,
    key: Digest,
    inputs: Mapping[str, Manifest],
    observer: Observer | None = None,
    running: RunningStages | None = None,
) -> Manifest:
    """Execute a stage in a child process, and raise the error that the child reports.

    The child's standard input stays open while the stage runs. The child ends when this input is
    closed, for example because this process has ended. The child's temporary files, which can have
    gigabytes, are in a scratch folder, since a killed child cannot remove them.

    Raises:
        StageError: the child crashed, was killed or timed out.
        OnnxOpsError: the error that the child reports.
    """
    with Scratch() as folder:
        result, scratch = folder / "result.json", folder / "tmp"
        scratch.mkdir()
        request = {
            **build_request(stage, key, inputs),
            "result": str(result),
            "scratch": str(scratch),
        }
        environ = {**os.environ, **to_environ(settings), "TMPDIR": str(scratch)}
        process = FORK_SERVER.fork(environ, settings.root)
        processes = set() if running is None else running.processes
        processes.add(process)
        observer = observer or Observer()
        output = StageOutput(_find_output_file(settings, stage, key), stage, observer)
        tail = OutputTail(
            process.stdout, PROGRESS, partial(observer.progressed, stage), output.write
        )
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode("utf-8") + b"\n")
                process.stdin.flush()
            code = process.wait(timeout=stage.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise StageError(
                f"the stage exceeded its time-out of {stage.timeout:g} s and was stopped",
                where=stage.id,
                why=tail.summary(),
                remedy="Raise `timeout` in the pipeline file if the stage needs more time. "
                "`recheck` uses the new value after `onnx-ops run FILE --no-cache benchmark`."
                + output.place,
            ) from None
        finally:
            processes.discard(process)
            process.kill()
            tail.join()
            output.remove_old()
        if not result.exists():
            raise StageError(
                f"the process of the stage ended with {describe_exit(code)}",
                where=stage.id,
                why=tail.summary() or "the process printed nothing",
                remedy="Run the stage again. If it crashes again, read its output." + output.place,
            )
        document = json.loads(result.read_text(encoding="utf-8"))
    if "error" in document:
        failed = document["error"]
        raise from_document(
            {**failed, "remedy": f"{failed.get('remedy') or ''}{output.place}".strip()}
        )
    return Manifest(files=document["files"])
