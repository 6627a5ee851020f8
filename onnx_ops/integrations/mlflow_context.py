"""Tags that every MLflow run gets when it is started inside a flow: `prefect.flow_run` and `git.sha`.

MLflow imports this while it is imported itself: so this imports nothing heavy, and not MLflow, whose abstract class it
fulfils without being derived from it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


class RunContext:
    """MLflow's `RunContextProvider`, for runs that a training function logs by itself.

    They can be found from the flow run and the commit then.
    Runs outside a flow are left alone.
    """

    def in_context(self) -> bool:
        """Return whether the process is a flow run."""
        return bool(_flow_run())

    def tags(self) -> dict[str, str]:
        """Return the tags that MLflow adds to runs."""
        from onnx_ops.app.context import resolve_commit

        tags = {"prefect.flow_run": _flow_run(), "git.sha": resolve_commit(Path.cwd(), "HEAD")}
        return {name: value for name, value in tags.items() if value}


def _flow_run() -> str:
    """Id of the flow run that this code runs in; Prefect's worker puts it into the environment of its process."""
    if "prefect" not in sys.modules:
        return os.environ.get("PREFECT__FLOW_RUN_ID", "")
    return str(importlib.import_module("prefect.runtime").flow_run.id or "")
