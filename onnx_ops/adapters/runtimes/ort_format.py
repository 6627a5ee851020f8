"""`.ort` files, which minimal builds of ONNX Runtime load instead of ONNX files.

ONNX Runtime's own converter writes the `.ort` files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from onnx_ops.adapters.isolation.crash_guard import ProcessCrashError, run_guarded
from onnx_ops.domain.artifact import digest_json, hex_digits
from onnx_ops.domain.target import OrtFormat, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.onnx_graph.compatibility import check_libraries
from onnx_ops.onnx_graph.files import digest_model
from onnx_ops.scratch import Scratch

MODEL = "model.ort"
OPERATORS = "required_operators_and_types.config"
"""Name of the file with the operators that the model needs in ONNX Runtime.

The build option `--include_ops_by_config` takes this file.
"""
USABILITY = "usability.txt"
"""Name of the report on how much of the model NNAPI and CoreML would run, and why."""

REPLAYED = "session.enable_saved_runtime_optimizations"
"""Session config entry that applies the optimizations that were saved in the file."""

_LEVELS = {"disabled": "disable", "basic": "basic", "extended": "extended", "all": "all"}


def prepare_model_file(model: Path, target: Target) -> Path:
    """Return the file that the target loads: the model, or its `.ort` file.

    The `.ort` file is made only once in a process.

    Raises:
        MeasurementError: the model cannot be converted.
        NotFoundError: a library of custom operators is missing.
        DigestMismatchError: a library of custom operators differs from the declared library.
    """
    if target.ort_format is None or model.suffix == ".ort":
        return model
    try:
        key = hex_digits(digest_json([digest_model(model), target.digest()]))
    except UserError as error:
        raise MeasurementError(
            "the model cannot be converted to an .ort file",
            where=model.name,
            why=f"{error.what}: {error.why}",
        ) from error
    folder = _scratch().path / key
    if (folder / MODEL).is_file():
        return folder / MODEL
    where = f"target {target.name}: ort_format"
    if len(target.custom_ops) > 1:
        what = (
            "the converter supports only one library of custom operators, "
            f"not {len(target.custom_ops)}"
        )
        raise MeasurementError(what, where=where)
    check_libraries(target.custom_ops, f"target {target.name}")
    library = Path(target.custom_ops[0].path) if target.custom_ops else None
    level = _LEVELS[target.session.graph_level]
    folder.mkdir(exist_ok=True)
    try:
        run_guarded(_convert, model.resolve(), folder, target.ort_format, level, library)
    except ProcessCrashError as crash:
        raise MeasurementError(
            "the model cannot be converted to an .ort file",
            where=where,
            why=crash.explanation,
            remedy="Leave this target out of benchmark.targets.",
        ) from None
    return folder / MODEL


def write_package(model: Path, target: Target, folder: Path) -> None:
    """Copy the files for a device to a folder: `MODEL`, `OPERATORS`, `USABILITY`.

    The target must have an `ort_format`. Raises the errors of `prepare_model_file`.
    """
    source = prepare_model_file(model, target).parent
    for name in (MODEL, OPERATORS, USABILITY):
        shutil.copyfile(source / name, folder / name)


@functools.cache
def _scratch() -> Scratch:
    """Return the folder of converted files, which is deleted when the process ends."""
    return Scratch()


def _convert(model: Path, folder: Path, form: OrtFormat, level: str, library: Path | None) -> None:
    """Convert a model to the ORT format. This function runs in a forked process.

    The converter prints messages, and reads the optimization level from an environment variable.
    """
    tool = importlib.import_module("onnxruntime.tools.convert_onnx_models_to_ort")
    os.environ["ORT_CONVERT_ONNX_MODELS_TO_ORT_OPTIMIZATION_LEVEL"] = level
    style = tool.OptimizationStyle[form.style.capitalize()]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tool.convert_onnx_models_to_ort(
            model,
            output_dir=Path(scratch),
            optimization_styles=[style],
            custom_op_library_path=library,
            target_platform=form.platform,
            enable_type_reduction=True,
        )
        (made,), (config,) = list(Path(scratch).glob("*.ort")), list(Path(scratch).glob("*.config"))
        # Comments contain paths of this machine, so the package would differ on each machine.
        lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / OPERATORS).write_text(
            "".join(line for line in lines if not line.startswith("#")), encoding="utf-8"
        )
        (folder / USABILITY).write_text(_usability(model), encoding="utf-8")
        os.replace(made, folder / MODEL)


def _usability(model: Path) -> str:
    """Return the report of the usability checker, or the error that prevented it."""
    lines: list[str] = []
    logger = logging.Logger("usability")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    checker = importlib.import_module("onnxruntime.tools.mobile_helpers.usability_checker")
    with contextlib.redirect_stdout(None):
        try:
            useful = checker.analyze_model(model, logger=logger)
            lines.append(f"NNAPI or CoreML may help: {'yes' if useful else 'no'}")
        except Exception as error:
            lines.append(f"this model cannot be checked: {type(error).__name__}: {error}")
    return "\n".join(line for line in lines if str(model) not in line) + "\n"
