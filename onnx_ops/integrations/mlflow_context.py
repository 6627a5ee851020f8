"""Tags of MLflow runs that are started inside a flow.

The tags are `prefect.flow_run` and `git.sha`. MLflow imports this module during its own import, so
the module imports neither MLflow nor heavy packages. Its class therefore implements the methods of
`RunContextProvider` without deriving from it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


class RunContext:
    """`RunContextProvider` of MLflow, for runs that a training function starts itself.

    The tags identify the flow run and the commit of these runs. Runs outside a flow are not tagged.
    """

    def in_context(self) -> bool:
        """Return whether this code runs inside a flow run."""
        return bool(_flow_run())

    def tags(self) -> dict[str, str]:
        """Return the tags that MLflow adds to runs."""
        from onnx_ops.app.context import resolve_commit

        tags = {"prefect.flow_run": _flow_run(), "git.sha": resolve_commit(Path.cwd(), "HEAD")}
        return {name: value for name, value in tags.items() if value}


def _flow_run() -> str:
    """Return the id of the current flow run.

    Until Prefect is imported, the id is read from the environment, where Prefect's worker sets it.
    The result is empty outside a flow run.
    """
    if "prefect" not in sys.modules:
        return os.environ.get("PREFECT__FLOW_RUN_ID", "")
    return str(importlib.import_module("prefect.runtime").flow_run.id or "")
