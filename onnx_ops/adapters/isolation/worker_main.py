"""Server loop of workers inside an isolated environment.

The module also contains the encoding of values on both sides of the process boundary. It needs this
package and the standard library, but no other package. Workers that exchange arrays or this
package's types also need numpy, annotated-types and cattrs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from onnx_ops.errors import MeasurementError, OnnxOpsError, StageError, describe_error

_ARRAY = "onnx-ops.npy"
_PLAIN = (str, int, float, bool)


def limit_memory(limit: int, *, children_too: bool = True) -> None:
    """Limit the data memory of this process, in bytes.

    A lower hard limit stays in force, since only a privileged process can raise it.

    Args:
        limit: the memory that this process can have.
        children_too: whether the limit also becomes the hard limit, which child processes cannot
            exceed. Otherwise, child processes can raise their limit up to the former hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit if children_too else hard))


def serve(worker: object, where: str, refusing: Collection[str] = ()) -> None:
    """Answer requests with the worker's methods until standard input is closed.

    A request names its method. Arguments of the process are the folder of visible packages, the
    file descriptor for answers, and the memory limit in bytes.

    Args:
        worker: the object whose methods are called; annotations declare the argument types.
        where: the location that errors show.
        refusing: the methods that raise ValueError to refuse inputs.
    """
    faulthandler.enable(all_threads=False)
    limit = int(sys.argv[3])
    limit_memory(limit)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        while True:
            request = load(requests.get())
            scratch = Path(request.pop("scratch"))
            answers.write(dump(_answer(worker, request, where, refusing, limit), scratch) + "\n")
            answers.flush()


def _listen(requests: queue.SimpleQueue[str]) -> None:
    """Read requests into a queue; end the process group when standard input closes.

    The client has the other end of the pipe, so it also closes when the client ends.
    """
    for line in sys.stdin:
        requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(
    worker: object, request: dict[str, Any], where: str, refusing: Collection[str], limit: int
) -> dict[str, Any]:
    do = request.pop("do")
    work: Callable[..., Any] = getattr(worker, do)
    timeout = request.pop("timeout")
    if timeout is not None:
        # This timer is a C thread. It prints the traceback and ends the process even if a
        # converter never releases the GIL.
        faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        kinds = get_type_hints(work)
        return {
            "done": work(
                **{name: _structure(value, kinds[name]) for name, value in request.items()}
            )
        }
    except OnnxOpsError as error:
        return {"error": error.as_document()}
    except MemoryError:
        traceback.print_exc()
        failure = StageError(
            f"the process needs more memory than its limit of {limit / 1e9:.1f} GB",
            where=where,
            remedy="Increase `env.memory` if it is set; otherwise use a machine with more memory.",
        )
        return {"error": failure.as_document()}
    except Exception as error:  # Frameworks raise many types of exceptions.
        if isinstance(error, ValueError) and do in refusing:
            return {"refused": str(error)}
        what, lines = describe_error(error), traceback.format_exc().splitlines()
        return {"error": StageError(what, where=where, why="\n".join(lines[-15:])).as_document()}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _structure(value: Any, kind: Any) -> Any:
    if kind in _PLAIN:
        return value
    # codec needs packages that environments for plain values do not have.
    from onnx_ops import codec

    return codec.from_json(value, kind)


def dump(value: object, folder: Path) -> str:
    """Return a value as JSON on one line.

    Arrays are written to files in the folder, and arrays of text are written without pickle.
    """

    def encode(part: object) -> Any:
        if type(part).__module__ != "numpy":
            from onnx_ops import codec

            return codec.to_json(part)
        import numpy as np

        array = np.asarray(part)
        handle, file = tempfile.mkstemp(suffix=".npy", dir=folder)
        with os.fdopen(handle, "wb") as stream:
            np.save(
                stream, array.astype(str) if array.dtype == object else array, allow_pickle=False
            )
        return {_ARRAY: file}

    return json.dumps(value, default=encode)


def load(text: str | bytes) -> Any:
    """Return the value that `dump` encoded.

    Values of this package's types are returned as plain JSON values. Arrays of text become arrays
    of objects.
    """

    def decode(entry: dict[str, Any]) -> Any:
        if entry.keys() != {_ARRAY}:
            return entry
        import numpy as np

        array = np.load(entry[_ARRAY], allow_pickle=False)
        return array.astype(object) if array.dtype.kind == "U" else array

    return json.loads(text, object_hook=decode)


def require_tensors(answers: Mapping[str, Any]) -> None:
    """Raise MeasurementError for an answer that is not a tensor."""
    for name, array in answers.items():
        if type(array).__module__ != "numpy":
            remedy = "Export the model with tensors, for example without ZipMap."
            raise MeasurementError(
                f"{name} is not a tensor, and only tensors can be compared", remedy=remedy
            )
