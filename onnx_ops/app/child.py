"""A stage in a process of its own: it can be killed, it can crash, and nothing else runs in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops import codec, plugins
from onnx_ops.adapters.isolation.process import LineListener, OutputTail, describe_exit
from onnx_ops.app.remote import ask, pool_of
from onnx_ops.app.turns import Quiet, machine_lock
from onnx_ops.config.settings import Settings, to_environ
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage, StageKind
from onnx_ops.errors import StageError, from_document
from onnx_ops.pipeline.stages import execute
from onnx_ops.pipeline.stages.champion import attach_champion
from onnx_ops.ports import Pools, Ports
from onnx_ops.scratch import Scratch

PROGRESS = b"\x1eprogress "
"""What a line of a child's output begins with that tells how far its stage is."""

Told = Callable[[Stage, str], None]

_TIMED = (StageKind.SEARCH, StageKind.BENCHMARK)
"""Stages whose figures are times: one of them at once."""


def _silent(stage: Stage, line: str) -> None:
    del stage, line


@dataclass(frozen=True)
class Performer:
    """Executes stages: here, in a child where the stage asks for it or has a time-out, or by a pool's worker.

    Performers with one `quiet` are used side by side.
    """

    settings: Settings
    ports: Ports
    tell: Told = _silent
    quiet: Quiet = field(default_factory=Quiet)

    def __call__(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        if pool := pool_of(stage):
            plugins.require(*plugins.EXTRAS["prefect"], where=f"pool {pool}")
            pools: Pools = plugins.load("pools", "prefect")
            return ask(pools, self.ports.store, stage, key, inputs, attempt=uuid.uuid4().hex)
        return self.here(stage, key, inputs)

    def here(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """On this machine, whatever pool the stage's target names."""
        if not stage.own_process and stage.timeout is None:
            return execute(stage, key, inputs, self.ports)
        if stage.kind not in _TIMED:
            with self.quiet.work():
                return in_child(self.settings, stage, key, inputs, self.tell)
        told = attach_champion(stage, self.ports) if stage.kind is StageKind.BENCHMARK else stage
        with self.quiet.measure(), machine_lock():
            return in_child(self.settings, told, key, inputs, self.tell)


def in_child(
    settings: Settings, stage: Stage, key: Digest, inputs: Mapping[str, Manifest], tell: Told = _silent
) -> Manifest:
    """Raises what the stage raised; StageError if its process crashed, was killed or ran past the time-out."""
    with Scratch() as folder:
        result, scratch = folder / "result.json", folder / "tmp"
        scratch.mkdir()
        request = {
            "stage": codec.to_json(stage),
            "key": key,
            "inputs": {name: dict(manifest.files) for name, manifest in inputs.items()},
            "result": str(result),
            "scratch": str(scratch),
        }
        code, said = _spawn(settings, json.dumps(request), stage, scratch, tell)
        if not result.exists():
            raise StageError(
                f"its process ended with {describe_exit(code)}",
                where=stage.id,
                why=said or "it printed nothing",
                remedy="Run the stage again; if it crashes again, the lines above are its last words.",
            )
        document = json.loads(result.read_text(encoding="utf-8"))
    if "error" in document:
        raise from_document(document["error"])
    return Manifest(files=document["files"])


def _spawn(settings: Settings, request: str, stage: Stage, scratch: Path, tell: Told) -> tuple[int, str]:
    """The child lives no longer than this process: it watches its standard input, which stays open until then.

    Its temporary files lie in `scratch`, as one that is killed leaves them: gigabytes where a model is large.

    Returns:
        How it ended, and the last of what it printed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "onnx_ops.app.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **to_environ(settings), "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    heard = LineListener(PROGRESS, lambda line: tell(stage, line))
    tail = OutputTail(process.stdout, heard)  # type: ignore[arg-type]
    try:
        if process.stdin is not None:
            process.stdin.write(request.encode("utf-8") + b"\n")
            process.stdin.flush()
        code = process.wait(timeout=stage.timeout)
    except BrokenPipeError:
        code = process.wait()
    except subprocess.TimeoutExpired:
        _end(process)
        raise StageError(
            f"it ran longer than its time-out of {stage.timeout:g} s and was stopped",
            where=stage.id,
            why=tail.summary(),
            remedy="Raise `timeout` in the pipeline file if the work is really that long.",
        ) from None
    finally:
        _end(process)
    return code, tail.summary()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
