"""Optimizer that runs the passes of an existing Olive workflow configuration."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnx_ops.adapters.optimizers.library import check_interface, read_options
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError, StageError, UserError, describe_error
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import find_quantized_nodes, restore_metadata, trace_nodes
from onnx_ops.ports import Optimizer
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.optimize import OptimizeRequest
from onnx_ops.scratch import Scratch

CONFIG = "config"

_KEPT = ("passes", "systems", "host", "target")
"""Sections of a configuration that are used.

The pipeline defines the sources, destinations and evaluation of models instead.
"""

_CODE = ("user_script", "script_dir", "model_script")
_ROWS = "calibration"
_NARROWING = re.compile("quant|float16|mixedprecision|nbits|rtn|gptq|awq|bnb", re.IGNORECASE)
"""Pattern of the types of passes that change a model's computation by design.

Other passes get strict parity checks.
"""

_EXCLUDING = (
    "OnnxDynamicQuantization",
    "OnnxStaticQuantization",
    "OnnxQuantization",
    "OnnxBlockWiseRtnQuantization",
)
"""Types of passes that get the excluded nodes in their option `nodes_to_exclude`."""

_GEMM_SUFFIX = "_MatMul"
"""Suffix that ONNX Runtime's dynamic quantizer adds to the name of a Gemm.

The quantizer adds the suffix before it applies exclusions.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OliveOptions:
    """Options of a run of Olive: a configuration, or its file in the project."""

    config: Json = None


class OliveOptimizer(Optimizer):
    """Optimizer that runs the passes of an Olive configuration in an environment.

    Option `config` is a JSON or YAML file of the project, or the content of such a file. Its
    `passes`, `systems`, `host` and `target` are used, and its systems must be local. The pipeline
    defines the model, the folders and the evaluation. The calibration rows replace the data sets of
    the configuration.
    """

    requirements = (
        "olive-ai==0.13.0",
        # olive-ai imports `requests` without declaring this dependency, see
        # https://github.com/microsoft/Olive/issues/2676
        "requests==2.34.2",
        "transformers==5.23.0",
        "onnx==1.23.2",
        "onnxruntime==1.31.1",
        "torch==2.13.0",
        "numpy==2.4.6",
    )
    tools: tuple[str, ...] = ()
    options = OliveOptions
    quantized = True

    def files(self, section: Quantize) -> tuple[str, ...]:
        """Return the configuration file that the section names, if any."""
        config = section.options.get(CONFIG)
        return (config,) if isinstance(config, str) else ()

    def inline_files(self, section: Quantize, root: Path) -> Quantize:
        """Return the section with the used part of the configuration in place of a file.

        Raises:
            UserError: the configuration is missing or unusable, or its file is outside the project.
            NotFoundError: the file does not exist.
        """
        where = f"variant {section.name}, options.config"
        config = read_options(section, self.options).get(CONFIG)
        if not config:
            remedy = (
                "Set options: {config: configs/olive/int8.json}, or write the configuration "
                "itself: {config: {passes: {...}}}."
            )
            raise UserError(
                "olive needs a configuration", where=f"variant {section.name}", remedy=remedy
            )
        if not isinstance(config, str | Mapping):
            raise UserError(
                "config must be a file of the project, or the configuration: {passes: {...}}",
                where=where,
            )
        if isinstance(config, str):
            # The environment that runs Olive's passes does not have this module, so it is imported
            # only here.
            from onnx_ops.config.yaml_reader import read_file

            name, path = config, (root / config).resolve()
            if not path.is_relative_to(root.resolve()):
                raise UserError(
                    f"the file {name} is not in the project",
                    where=where,
                    remedy="Copy the file to configs/olive/.",
                )
            if not path.is_file():
                remedy = "Write the path relative to the project's folder."
                raise NotFoundError(f"there is no file {name}", where=where, remedy=remedy)
            config, where = read_file(path).value, name
        return replace(section, options={**section.options, CONFIG: _used(config, where)})

    def quantizes(self, section: Quantize) -> bool:
        """Return whether the type of a pass shows that it changes the computation."""
        config: Any = section.options[CONFIG]
        return any(_NARROWING.search(str(entry["type"])) for entry in _passes(config["passes"]))

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Run the configured passes in order and check their result.

        Raises:
            UserError: the rows that a pass reads are missing or have an unsupported layout, or an
                excluded node is missing or was quantized.
            StageError: Olive fails, makes no model, or changes the inputs or outputs.
        """
        section = request.section
        source = read_model(request.source)
        trace_nodes(section.exclude, source, source)
        config: Any = section.options[CONFIG]
        entries = list(_passes(config["passes"]))
        types = [str(entry["type"]) for entry in entries]
        reads_data = any(path[-1] == "data_config" and value for path, value in _walk(entries))
        if reads_data and request.calibration is None:
            raise UserError(
                "a pass reads data, but there are no calibration rows",
                where=f"variant {section.name}",
                remedy="Add calibrate: {data: train, samples: 256}. These rows replace "
                "the data sets of the configuration.",
            )
        # The module loads NumPy, so it is imported only here.
        from onnx_ops.measure.row_layout import read_layout

        if (
            reads_data
            and not read_layout(read_model_info(request.source), request.values).has_plain_inputs
        ):
            raise UserError(
                "a pass reads data, but some inputs have no rows on their first axis",
                where=f"variant {section.name}",
                remedy="Use method static: Olive's data sets have rows on the first axis of every "
                "input.",
            )
        with Scratch() as folder:
            made = _run(_workflow(request, config, folder), section.name)
            derived = read_model(made)
            restore_metadata(derived, source)
            write_model(derived, request.path)
        check_interface(request.source, request.path, "Olive", f"variant {section.name}")
        if quantized := find_quantized_nodes(section.exclude, derived, _GEMM_SUFFIX):
            raise UserError(
                f"excluding {', '.join(quantized)} had no effect",
                where=f"variant {section.name}",
                why="these nodes are quantized or missing in the result",
                remedy=_explain_exclusion(types),
            )
        return (f"Olive {version('olive-ai')}: {', '.join(types)}",)


def _explain_exclusion(types: Collection[str]) -> str:
    """Return the remedy for excluded nodes that are quantized or missing in the result."""
    if set(_EXCLUDING).isdisjoint(types):
        return (
            f"Passes of type {', '.join(types)} do not receive `exclude`: set their own option for "
            "excluded nodes."
        )
    return (
        "Olive's preparation fuses and renames nodes: set quant_preprocess: false, "
        "or leave these nodes out of `exclude`."
    )


def _used(config: Any, where: str) -> Mapping[str, Json]:
    """Return the part of a configuration that affects a variant.

    Raises:
        UserError: the configuration lacks passes, contains a search, refers to code, or uses a
            system that is not local. Or a pass has no type, or has alternatives.
    """
    if (
        not isinstance(config, Mapping)
        or not isinstance(config.get("passes"), Mapping)
        or not config["passes"]
    ):
        raise UserError(
            "the configuration has no passes",
            where=where,
            remedy="Add `passes: {...}` to the configuration.",
        )
    # Olive accepts these keys in the section `engine` or at the top level, and prefers the section.
    flat = {**config, **config.get("engine", {})}
    if flat.get("search_strategy"):
        what = (
            "the configuration contains a search, whose result depends on the speed of the machine"
        )
        raise UserError(
            what,
            where=where,
            remedy="Leave out search_strategy. `method: auto` searches under a budget.",
        )
    used = {key: flat[key] for key in _KEPT if flat.get(key) is not None}
    for path, value in _walk(used):
        if path[-1] in _CODE and value:
            what = f"{'.'.join(path)} refers to code, which the key of the stage does not include"
            remedy = "Leave this entry out; the rows come from `calibrate`."
            raise UserError(what, where=where, remedy=remedy)
    _check_systems(_list_systems(used), where)
    for entry in _passes(used["passes"]):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
            raise UserError(
                "a pass has no type", where=where, remedy="Set {type: OnnxDynamicQuantization}."
            )
    return used


def _list_systems(used: Mapping[str, Any]) -> dict[str, Any]:
    """Return all systems of a configuration by their place in it."""
    systems = {f"systems.{name}": system for name, system in used.get("systems", {}).items()}
    users = [("", used)] + [
        (f"passes.{name}.", entry)
        for name, given in used["passes"].items()
        for entry in (given if isinstance(given, list) else [given])
        if isinstance(entry, Mapping)
    ]
    # A text is the name of a system.
    inline = {
        f"{place}{key}": user[key]
        for place, user in users
        for key in ("host", "target")
        if not isinstance(user.get(key) or "", str)
    }
    return {**systems, **inline}


def _check_systems(systems: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a system of another type than `LocalSystem`."""
    for name, system in systems.items():
        if not isinstance(system, Mapping) or system.get("type") != "LocalSystem":
            remedy = (
                "Passes run in the environment of the stage (`env`); set type: LocalSystem, "
                "or leave the system out."
            )
            raise UserError(f"{name} is not a LocalSystem", where=where, remedy=remedy)


def _passes(passes: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each pass.

    A name can refer to one pass or to a list of alternatives, which must have exactly one entry.

    Raises:
        UserError: a list does not have exactly one entry.
    """
    for name, given in passes.items():
        if isinstance(given, list | tuple) and len(given) != 1:
            raise UserError(
                f"passes.{name} does not list exactly one alternative",
                remedy="List one alternative; only `method: auto` searches.",
            )
        yield given[0] if isinstance(given, list | tuple) else given


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    items: Any = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, str(key)), inner
        yield from _walk(inner, (*path, str(key)))


def _workflow(request: OptimizeRequest, config: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Build the configuration of an Olive workflow for a request and its rows."""
    passes, wanted = {}, request.section.exclude
    for name, entry in zip(config["passes"], _passes(config["passes"]), strict=True):
        options = _with_rows({key: value for key, value in entry.items() if key != "evaluator"})
        if wanted and entry["type"] in _EXCLUDING:
            rewritten = [node + _GEMM_SUFFIX for node in wanted]
            options["nodes_to_exclude"] = sorted(
                {*options.get("nodes_to_exclude", ()), *wanted, *rewritten}
            )
        passes[name] = options
    rows = [] if request.calibration is None else [_data(request.calibration, scratch / "rows")]
    return {
        **{key: config[key] for key in _KEPT if key in config},
        "passes": passes,
        "input_model": {"type": "ONNXModel", "model_path": str(request.source)},
        "data_configs": rows,
        "output_dir": str(scratch / "result"),
        "cache_dir": str(scratch / "cache"),
        "evaluate_input_model": False,
    }


def _with_rows(value: Any) -> Any:
    """Return the options of a pass with the calibration rows in place of data sets."""
    if isinstance(value, Mapping):
        return {
            key: _ROWS if key == "data_config" and inner else _with_rows(inner)
            for key, inner in value.items()
        }
    return value


def _data(calibration: Tensors, folder: Path) -> dict[str, Any]:
    """Write rows as Olive's raw data set; return its configuration.

    The data set has a folder for each input, and a file for each row.
    """
    import numpy as np

    names = list(calibration)
    for place, name in enumerate(names):
        inner = folder / str(place)
        inner.mkdir(parents=True)
        for number, row in enumerate(calibration[name]):
            np.ascontiguousarray(row).tofile(inner / f"{number:08}.bin")
    return {
        "name": _ROWS,
        "load_dataset_config": {
            "type": "raw_dataset",
            "params": {
                "data_dir": str(folder),
                "input_names": names,
                "input_dirs": [str(place) for place in range(len(names))],
                "input_suffix": ".bin",
                "input_shapes": [list(calibration[name].shape[1:]) for name in names],
                "input_types": [str(calibration[name].dtype) for name in names],
            },
        },
    }


def _run(workflow: Mapping[str, Any], variant: str) -> Path:
    """Run a workflow and return the path of the model that Olive made.

    Raises:
        StageError: Olive fails, or makes no model.
    """
    where = f"variant {variant}"
    remedy = (
        "If the passes need other packages, add these packages to the default requirements: "
        f"set `env.requirements` to [{', '.join(OliveOptimizer.requirements)}, PACKAGE]."
    )
    with _warnings() as messages:
        try:
            done = importlib.import_module("olive.workflows").run(dict(workflow))
        except Exception as error:
            raise StageError(
                "Olive failed", where=where, why=describe_error(error), remedy=remedy
            ) from error
    best = done.get_best_candidate() if done is not None and done.has_output_model() else None
    if best is None or not best.model_path:
        why = "; ".join(messages)[:600] or "Olive reported no reason"
        raise StageError("Olive made no model", where=where, why=why, remedy=remedy)
    path = Path(best.model_path)
    return next(iter(sorted(path.glob("*.onnx")))) if path.is_dir() else path


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect Olive's warnings and errors in order.

    Olive only logs most of its errors and continues.
    """
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            while error is not None and error.__cause__ is not None:
                error = error.__cause__
            messages.append(
                f"{record.getMessage()}{f' {type(error).__name__}: {error}' if error else ''}"
            )

    logger, listener = logging.getLogger("olive"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
