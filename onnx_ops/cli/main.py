"""Command line of onnx-ops.

A command imports only the modules that it uses.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

PIPELINES, RELEASES, TOOLS, MACHINE = "Pipelines", "Releases", "Tools", "Machine"

_COMMANDS = {
    "init": (PIPELINES, "pipelines"),
    "check": (PIPELINES, "pipelines"),
    "plan": (PIPELINES, "pipelines"),
    "run": (PIPELINES, "pipelines"),
    "affected": (PIPELINES, "pipelines"),
    "explain": (RELEASES, "releases"),
    "report": (RELEASES, "releases"),
    "export-dvc": (RELEASES, "releases"),
    "recheck": (RELEASES, "releases"),
    "promote": (RELEASES, "releases"),
    "forecast": (RELEASES, "forecasts"),
    "rollout": (RELEASES, "rollouts"),
    "rollback": (RELEASES, "rollouts"),
    "reconcile": (RELEASES, "releases"),
    "webhooks": (RELEASES, "messages"),
    "notify": (RELEASES, "messages"),
    "status": (RELEASES, "endpoints"),
    "history": (RELEASES, "endpoints"),
    "console": (RELEASES, "console"),
    "prune": (RELEASES, "endpoints"),
    "delete": (RELEASES, "endpoints"),
    "analysis": (RELEASES, "analysis"),
    "inspect": (TOOLS, "inspect"),
    "judge": (TOOLS, "judge"),
    "bench": (TOOLS, "tools"),
    "quantize": (TOOLS, "quantize"),
    "serve": (MACHINE, "machine"),
    "doctor": (MACHINE, "machine"),
    "docs": (MACHINE, "pages"),
    "targets": (MACHINE, "machine"),
    "work": (MACHINE, "machine"),
    "keys": (MACHINE, "keys"),
    "ledger": (MACHINE, "ledgers"),
}
"""Panel and module of each command, in the order of the help.

The function or group in the module has the name of the command, with `_` in place of `-`.
"""

_RUNNING_MODELS = ("judge", "bench", "quantize")
"""Commands for which a child process imports ONNX Runtime early.

They run models unless their input is wrong.
"""


def build_app(command: str = "") -> typer.Typer:
    """Return the command line with one command; with all if no command has this name."""
    import typer

    from onnx_ops.cli.common import Command, CommandGroup, handle_errors, program

    app = typer.Typer(
        name="onnx-ops",
        cls=CommandGroup,
        callback=program,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Release engineering for ONNX models: one file from training to rollback.",
        epilog="Start with two files: onnx-ops judge OLD.onnx NEW.onnx. With a pipeline file: "
        "onnx-ops check FILE, onnx-ops plan FILE, onnx-ops run FILE.",
    )
    for name in [command] if command in _COMMANDS else _COMMANDS:
        panel, module = _COMMANDS[name]
        function = getattr(import_module(f"onnx_ops.cli.{module}"), name.replace("-", "_"))
        if isinstance(function, typer.Typer):
            app.add_typer(function, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel, cls=Command)(handle_errors(function))
    return app


def __getattr__(name: str) -> Any:
    """Return attribute `app`, the command line with all commands, built at first use."""
    if name != "app":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    globals()["app"] = app = build_app()
    return app


def main() -> None:
    """Run the command line."""
    # Imports create almost no garbage, but with the default thresholds, many garbage collections
    # would run during the imports.
    gc.set_threshold(50_000, 20, 20)
    # Garbage collections at the end of the process would traverse all objects of MLflow's modules
    # and free nothing. Each takes about 0.16 s of CPU (`gc.collect()` after the import of MLflow
    # 3.17).
    atexit.register(gc.freeze)
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in _RUNNING_MODELS and not {"--help", "-h"}.intersection(sys.argv):
        # A child process imports ONNX Runtime while this process imports the other modules.
        from onnx_ops.adapters.isolation.crash_guard import prepare

        prepare("onnx_ops.adapters.runtimes.onnxruntime")
    build_app(command)()
