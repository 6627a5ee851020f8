"""Answer requests inside an isolated environment. Needs the standard library only, and numpy where arrays travel."""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onnx_ops.errors import MeasurementError, OnnxOpsError, StageError, quoted

if TYPE_CHECKING:
    from onnx_ops.ports.data import Array


class RequestHandler(Protocol):
    """Handles requests by methods of their names, with JSON values.

    `where` is what errors name; `refusing` are the methods that refuse inputs by ValueError.
    """

    where: str
    refusing: tuple[str, ...]


def serve(worker: RequestHandler) -> None:
    """Answer requests until standard input is closed.

    Arguments of the process: folder of visible packages, file descriptor for answers, bytes of memory.
    """
    faulthandler.enable(all_threads=False)
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        while True:
            answers.write(json.dumps(_answer(worker, json.loads(requests.get()), limit)) + "\n")
            answers.flush()


def _listen(requests: queue.SimpleQueue[str]) -> None:
    """Read requests. The client holds the other end of standard input; when it closes, the process ends."""
    for line in sys.stdin:
        requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(worker: RequestHandler, request: dict[str, Any], limit: int) -> dict[str, Any]:
    do = request.pop("do")
    work: Callable[..., Any] = getattr(worker, do)
    timeout = request.pop("timeout")
    if timeout is not None:
        # A thread of C: it speaks and ends the process even where a converter never gives the interpreter back.
        faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return {"done": work(**request)}
    except OnnxOpsError as error:
        return {"error": error.as_document()}
    except MemoryError:
        traceback.print_exc()
        failure = StageError(
            f"it needs more memory than its limit of {limit / 1e9:.1f} GB",
            where=worker.where,
            remedy="Raise `env.memory` if the machine has more.",
        )
        return {"error": failure.as_document()}
    except Exception as error:  # a framework raises many types of exceptions
        if isinstance(error, ValueError) and do in worker.refusing:
            return {"refused": str(error)}
        what, lines = (
            f"{type(error).__name__}: {quoted(error)}",
            "".join(traceback.format_exception(error)).splitlines(),
        )
        return {"error": StageError(what, where=worker.where, why="\n".join(lines[-15:])).as_document()}
    finally:
        faulthandler.cancel_dump_traceback_later()


PREFIX = "input/"
"""Prefix of each name in a file: a tensor's name could be that of an argument of savez."""


def save_arrays(tensors: Mapping[str, Any], path: Path) -> Path:
    """Write named tensors to an `.npz` file; texts without pickle."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray):
            remedy = "Export the model with tensors, for example without ZipMap."
            raise MeasurementError(f"{name} is not a tensor, and only tensors can be compared", remedy=remedy)
        arrays[PREFIX + name] = array.astype(str) if array.dtype == object else array
    np.savez(path, **arrays)
    return path


def load_arrays(path: Path) -> Mapping[str, Array]:
    """Read a file of `save_arrays`; texts become objects again."""
    import numpy as np

    with np.load(path, allow_pickle=False) as archive:
        arrays = {name.removeprefix(PREFIX): archive[name] for name in archive.files}
    return {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in arrays.items()}
