"""Netron, which shows a graph in the browser of this machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx_ops.plugins import EXTRAS, require


@contextmanager
def view(path: Path, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve a model's graph; give its URL and a function that waits for the end. Port 0 takes a free one."""
    require(*EXTRAS["view"], where="inspect --serve")
    netron = importlib.import_module("netron")
    host, taken = netron.start(str(path), address=("127.0.0.1", port or None), browse=False)
    try:
        yield f"http://{host}:{taken}", netron.wait
    finally:
        netron.stop((host, taken))
