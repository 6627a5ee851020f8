"""Processes that start in milliseconds, because their imports are preloaded.

Python starts one fork server for each process, with the modules that its first user names. Here
later users add their modules.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_loaded: set[str] = {"onnx", "onnxruntime", "onnx_ops.adapters.isolation.crash_guard"}


def fork_context(*modules: str) -> ForkServerContext:
    """Return the context of processes that have these modules preloaded.

    Restart the fork server if it lacks any of them.
    """
    context = multiprocessing.get_context("forkserver")
    if not _loaded.issuperset(modules):
        _loaded.update(modules)
        server = forkserver._forkserver
        server._stop()  # type: ignore[attr-defined]
        context.set_forkserver_preload(sorted(_loaded))
        server.ensure_running()
    return context
