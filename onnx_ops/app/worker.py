"""The child process of a stage, forked by the fork server.

The process reads one request, executes its stage, and writes the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops.adapters.isolation.process import IsolatedProcess, read_memory_bytes
from onnx_ops.adapters.isolation.worker_main import limit_memory
from onnx_ops.app.context import build_context
from onnx_ops.app.execution import PROGRESS
from onnx_ops.app.fork_server import serve
from onnx_ops.app.stage_request import parse_request
from onnx_ops.config.settings import load_settings
from onnx_ops.errors import OnnxOpsError, StageError
from onnx_ops.pipeline.stages import execute
from onnx_ops.scratch import storage_errors, write_durably


def main() -> None:
    """Read one request, execute its stage, and write the result."""
    # With line buffering, the parent process shows the output of user code immediately.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    IsolatedProcess.copy_output = partial(os.write, sys.stdout.fileno())
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_parent, args=(Path(request["scratch"]),), daemon=True).start()
    document = _answer(request)
    write_durably(Path(request["result"]), json.dumps(document).encode())


def _die_with_parent(scratch: Path) -> None:
    """End this process when its parent has ended.

    Standard input is a pipe that closes when the parent ends. The processes that the stage has
    started are in the process group of this process, and are killed too. The stage's temporary
    files are removed here, since the parent can no longer remove them.
    """
    sys.stdin.read()
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        scratch.parent.rmdir()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    stage, key, inputs = parse_request(request)
    limit = stage.memory or read_memory_bytes()
    limit_memory(limit, children_too=False)
    try:
        with storage_errors(stage.id):
            context = replace(build_context(load_settings()), report_progress=_report_progress)
            manifest = execute(stage, key, inputs, context)
    except OnnxOpsError as error:
        return {"error": error.as_document()}
    except MemoryError:
        failure = StageError(
            f"the stage needs more memory than its limit of {limit / 1e9:.1f} GB",
            where=stage.id,
            remedy="Raise `memory` in the pipeline file if the machine has more, or run the stage "
            "on a machine with more memory.",
        )
        return {"error": failure.as_document()}
    return {"files": dict(manifest.files)}


def _report_progress(line: str) -> None:
    """Print a line of progress for the parent process."""
    os.write(sys.stdout.fileno(), PROGRESS + line.replace("\n", " ").encode("utf-8") + b"\n")


if __name__ == "__main__":
    serve()
    main()
