"""Exporters of PyTorch modules, with torch.onnx.export.

The exported models are PyTorch modules, Keras 3 models on PyTorch, and transformers models.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.input_binding import CallBinding, bind_call
from onnx_ops.adapters.exporters.keras_models import (
    call_keras,
    check_keras_inputs,
    import_keras,
    load_keras,
)
from onnx_ops.adapters.exporters.signature import (
    Precision,
    check_section,
    convert_refusals,
    find_file,
    find_file_with_suffix,
    get_free_axes,
    name_outputs,
)
from onnx_ops.domain.pipeline import TRANSLATIONS, Export
from onnx_ops.errors import NotFoundError, UserError, describe_error
from onnx_ops.measure.user_functions import load_function
from onnx_ops.onnx_graph.files import DEFAULT_DOMAINS, iterate_graphs, iterate_nodes, write_model
from onnx_ops.ports import TracingExporter
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.export import ExportRequest, Tracer

FILE = "model.pt"

_NOISY = ("torch", "onnxscript", "onnx_ir")
"""Roots of loggers that report the exporter's internal steps.

Messages that matter to users are raised as errors.
"""


_UNTRANSLATED = re.compile(
    r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>"
)
"""Message of torch 2.13 about an operator without a translation.

Only the text of the message names the operator.
"""


class TorchExporter(TracingExporter):
    """Exporter of PyTorch modules.

    `bind_call` describes how inputs are passed to the parameters of `forward`. Option
    `translations` (`package.module:TABLE`) names a table of the project. The table maps operators
    of torch to ONNX functions.
    """

    tools: tuple[str, ...] = ("torch", "numpy")
    options: tuple[str, ...] = (TRANSLATIONS,)
    converters = ("onnxscript", "onnx-ir", "onnx")

    def save(self, model: object, folder: Path) -> None:
        """Write the whole module with `torch.save`."""
        torch = importlib.import_module("torch")
        torch.save(model, folder / FILE)

    def load(self, folder: Path) -> object:
        """Load the pickled module.

        Loading runs the code of the pickle. The store has verified the file, or it is the user's
        own `model:`.

        Raises:
            NotFoundError: the folder contains neither `FILE` nor exactly one file.
            UserError: the module cannot be unpickled.
        """
        torch = importlib.import_module("torch")
        file = find_file(folder, FILE)
        try:
            return torch.load(file, map_location="cpu", weights_only=False)
        except Exception as error:
            raise UserError(
                f"the module cannot be loaded: {type(error).__name__}: {error}",
                where=file.name,
                remedy="Write the complete module with torch.save, and make its class importable "
                "in this environment.",
            ) from error

    def export(self, model: object, request: ExportRequest) -> None:
        """Export the module, and remove metadata that depends on this machine.

        Raises:
            UserError: the module cannot be exported at all, or at the opset of the section.
        """
        section = request.section
        module = self._module(model, request)
        proto = _export(importlib.import_module("torch"), module, request).model_proto
        # For an opset that the exporter does not write, it converts the file. If this conversion
        # fails, the file has another opset.
        written = max(
            entry.version for entry in proto.opset_import if entry.domain in DEFAULT_DOMAINS
        )
        if written != section.opset:
            raise UserError(
                f"the exporter wrote opset {written}, not {section.opset}",
                where="export",
                why="the exporter could not convert the operators of this module",
                remedy=f"Set export.opset: {written}.",
            )
        proto.ir_version = section.ir_version
        proto.producer_version = ""
        for node in iterate_nodes(proto):
            # The module path of a node is kept. Among the other properties are stack traces with
            # paths of this machine.
            scopes = [
                (p.key, p.value)
                for p in node.metadata_props
                if p.key == "pkg.torch.onnx.name_scopes"
            ]
            del node.metadata_props[:]
            node.doc_string = ""
            for key, value in scopes:
                node.metadata_props.add(key=key, value=value)
        for graph in iterate_graphs(proto):
            for value in (
                graph,
                *graph.input,
                *graph.output,
                *graph.value_info,
                *graph.initializer,
            ):
                del value.metadata_props[:]
        write_model(proto, request.path)

    def tracer(self, model: object, request: ExportRequest) -> Tracer:
        """Return a tracer of the exported program.

        Values have the same names in the program and in the exported file.
        """
        torch = importlib.import_module("torch")
        module = self._module(model, request)
        program, binding = (
            _export(torch, module, request).exported_program,
            _bind(module, request.samples),
        )

        def trace(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, Tensors | None]:
            rows = {name: inputs[name] for name in binding.names}
            single = _traced(torch, program, rows, names, None)
            with contextlib.suppress(ValueError):
                return single, _traced(torch, program, rows, names, torch.float64)
            return single, None

        return trace

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the module.

        The result is None for float64 if the module runs only in float32, for example because it
        creates float32 tensors.

        Raises:
            ValueError: the module refuses the inputs.
        """
        torch: Any = importlib.import_module("torch")
        module: Any = model
        single = {name: _tensor(torch, array, None) for name, array in inputs.items()}
        if precision == "float32":
            return self._answers(torch, module, single)
        double = {name: _tensor(torch, array, torch.float64) for name, array in inputs.items()}
        try:
            return self._answers(torch, copy.deepcopy(module).double(), double)
        except ValueError:
            self._answers(torch, module, single)
            return None

    def _answers(self, torch: Any, module: Any, rows: Mapping[str, Any]) -> dict[str, Array]:
        with convert_refusals("the module", RuntimeError, IndexError, TypeError), torch.no_grad():
            answer = self._call(module.eval(), rows)
        return {name: value.detach().numpy() for name, value in name_outputs(answer).items()}

    def _call(self, module: Any, rows: Mapping[str, Any]) -> Any:
        """Call the module with inputs by name."""
        positional, keyword = _bind(module, rows).pack(rows)
        return module(*positional, **keyword)

    def _module(self, model: Any, request: ExportRequest) -> Any:
        """Return the module to export after a check of its inputs."""
        if isinstance(model, importlib.import_module("torch").nn.Module):
            _bind(model, request.samples, ordered=request.ordered)
        return model


def _export(torch: Any, model: object, request: ExportRequest) -> Any:
    if not isinstance(model, torch.nn.Module):
        remedy = (
            "`train.run` must return a module. The file of `model:` must contain a complete module "
            "(`torch.save(module, FILE)`), not its state_dict."
        )
        raise UserError(
            f"{type(model).__name__} is not a torch.nn.Module", where="export", remedy=remedy
        )
    section = request.section
    check_section(section, request.samples, (TRANSLATIONS,))
    table = _load_translations(section)
    module: Any = model.eval()
    binding = _bind(module, request.samples)
    rows, outputs = _choose_rows(torch, module, binding, request)
    positional, keyword = binding.pack(rows)
    # Free axes are declared by names and not by torch.export.Dim. With Dim, torch.onnx silently
    # fixes the axes that it cannot keep free.
    free = {name: dict(get_free_axes(section, name)) for name in binding.names}
    recurrent = importlib.import_module("onnx_ops.adapters.exporters.torch_recurrent")
    attention = importlib.import_module("onnx_ops.adapters.exporters.torch_attention")
    try:
        with _quiet(), recurrent.RecurrentOperators(), attention.AttentionOperators():
            return torch.onnx.export(
                module,
                positional,
                kwargs=keyword,
                dynamo=True,
                opset_version=section.opset,
                input_names=list(binding.names),
                output_names=outputs,
                dynamic_shapes=binding.by_parameter(free),
                custom_translation_table={**recurrent.TRANSLATIONS, **(table or {})},
                verbose=False,
            )
    except Exception as error:  # The exporter of torch raises many types of exceptions.
        with _quiet(), recurrent.RecurrentOperators():
            raise _explain_failure(error, module, binding, rows, free) from error


def _choose_rows(
    torch: Any, module: Any, binding: CallBinding, request: ExportRequest
) -> tuple[Any, list[str]]:
    """Return the rows for the trace, and the names of the module's outputs.

    The trace uses the first two rows, because a trace with few rows is fast.

    Raises:
        UserError: the module refuses two rows, or accepts only all rows together.
    """
    few = {name: _tensor(torch, array, None) for name, array in request.take(2).items()}
    try:
        return few, _try_out(torch, module, *binding.pack(few))
    except UserError as error:
        whole = {name: _tensor(torch, array, None) for name, array in request.samples.items()}
        try:
            _try_out(torch, module, *binding.pack(whole))
        except UserError:
            raise error from None
        raise UserError(
            "the module accepts all rows of the samples together, but not the first two rows",
            where="export",
            why=f"{error.why}; an endpoint answers any number of rows, each independently",
            remedy="Put data that belongs together into one row. For a graph neural network, give "
            "nodes and edges a leading axis of graphs.",
        ) from error


def _explain_failure(
    error: Exception,
    module: Any,
    binding: CallBinding,
    rows: Mapping[str, Any],
    free: Mapping[str, Mapping[int, str]],
) -> UserError:
    """Return the error of an export that failed.

    `free` are the free axes in the order of the arguments.
    """
    # The outer exceptions name only the failed steps, and the innermost one has the reason.
    cause = error.__cause__ or error
    while type(cause).__name__ == "PassError" and cause.__cause__:
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return cause
    if unknown := _UNTRANSLATED.search(str(error)):
        name = ".".join(unknown.groups()).replace("::", ".")
        return UserError(
            f"torch.onnx.export has no translation for operator {name}",
            where="export",
            why="torch has no ONNX function for the operator or for its complex inputs",
            remedy=f"Map torch.ops.{name} to a function of onnxscript in a table of the project, "
            f"and set export.options: {{{TRANSLATIONS}: package.module:TABLE}}.",
        )
    watch = importlib.import_module("onnx_ops.adapters.exporters.torch_fixed_axes")
    shapes = binding.by_parameter(free)
    # TorchExportError means that the trace failed. Other errors mean that a later step failed.
    is_traced = type(error).__name__ != "TorchExportError"
    for fixed in (
        () if is_traced else watch.find_fixed_axes(module, *binding.pack(rows), shapes, free)
    ):
        # Axis 0 is the batch. Without its entry it is free, or it has the size of the trace.
        other = f" Or remove the axis from `export.dynamic.{fixed.name}`." if fixed.axis else ""
        return UserError(
            f"the module fixes axis {fixed.axis} of {fixed.name} "
            f"({free[fixed.name][fixed.axis]}) at {fixed.size}",
            where="export.dynamic",
            why=fixed.place,
            remedy="Replace the code that depends on this size: a loop over the axis, "
            f"or a layer or constant of this size.{other}",
        )
    return UserError(
        "torch.onnx.export cannot export the module",
        where="export",
        why=describe_error(cause),
        remedy="Check for data-dependent control flow, and name every free axis in "
        "`export.dynamic`.",
    )


def _load_translations(section: Export) -> Mapping[Any, Any] | None:
    """Return the project's ONNX functions by operator of torch.

    The result is None if the section does not name a table.

    Raises:
        MissingPackageError, NotFoundError: the module, a package or the table is missing.
        UserError: the module raises an error, or the object is not a table of functions.
    """
    if not section.translations:
        return None
    where = f"export.options.{TRANSLATIONS}"
    table: Any = load_function(section.translations, where)
    if not isinstance(table, Mapping) or not all(
        callable(entry) for pair in table.items() for entry in pair
    ):
        raise UserError(
            f"{section.translations} is not a table of translations",
            where=where,
            why="a table maps operators of torch to functions",
            remedy="Write the table like {torch.ops.acme.scale.default: scale}, "
            "where `scale` is a function of onnxscript.",
        )
    return table


def _traced(
    torch: Any, program: Any, inputs: Tensors, names: Collection[str], dtype: Any
) -> dict[str, Array]:
    """Run the program; return the values with these names.

    Other values are released when no further node uses them. With `dtype`, floating-point inputs
    and weights are converted to this type.

    Raises:
        ValueError: the program refuses the inputs or the type.
    """
    values: dict[str, Array] = {}

    class Watcher(torch.fx.Interpreter):  # type: ignore[misc,name-defined,unused-ignore]
        def run_node(self, n: Any) -> Any:
            value = super().run_node(n)
            if n.name in names and isinstance(value, torch.Tensor):
                values[n.name] = value.detach().numpy().copy()
            return value

    rows = [_tensor(torch, array, dtype) for array in inputs.values()]
    with convert_refusals("the program", RuntimeError, AssertionError, IndexError, TypeError):
        with _quiet():
            # The program shares its weights with the model, which must not change, so the module is
            # copied.
            module = copy.deepcopy(program.module())
        with torch.no_grad():
            answer = Watcher(module if dtype is None else module.to(dtype)).run(*rows)
    outputs = name_outputs(answer).items()
    return values | {name: value.detach().numpy() for name, value in outputs if name in names}


def _tensor(torch: Any, array: Any, dtype: Any) -> Any:
    tensor = torch.from_numpy(array.copy())
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _bind(module: Any, inputs: Collection[str], *, ordered: bool = True) -> CallBinding:
    """Bind inputs to the parameters of `forward`.

    With `ordered`, the order of inputs without names is treated as declared. Only the check before
    an export passes what the data declares.
    """
    return bind_call(
        module.forward, inputs, owner=f"`forward` of {type(module).__name__}", ordered=ordered
    )


def _try_out(
    torch: Any, module: Any, positional: tuple[Any, ...], keyword: Mapping[str, Any]
) -> list[str]:
    """Return the names of the module's outputs for the samples.

    The type of an output must exist in NumPy, and must not be complex, since the exporter would
    write another type.

    Raises:
        UserError: the module refuses the samples, or an output has an unsupported type.
    """
    try:
        with torch.no_grad():
            answer = module(*positional, **keyword)
    except Exception as error:  # `forward` is code of the user, which can raise any exception.
        raise UserError(
            "the module refuses the samples",
            where="export",
            why=describe_error(error),
            remedy="Check the types and shapes of the arrays that `inputs:` of the data maps, such "
            "as float32 instead of float64.",
        ) from error
    values = name_outputs(answer)
    if not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise UserError(
            f"the module returns {type(answer).__name__} with values that are not tensors",
            where="export",
            remedy="`forward` must return a tensor, a list or tuple of tensors, "
            "or a flat dictionary of them.",
        )
    for name, value in values.items():
        what = f"output {name!r} has type {str(value.dtype).removeprefix('torch.')}"
        if value.is_complex():
            raise UserError(
                what,
                where="export",
                why="the exporter writes complex numbers as pairs of real numbers, in an "
                "additional dimension",
                remedy="Return torch.view_as_real(output), which has this dimension in torch too.",
            )
        if value.dtype == torch.bfloat16:
            why = "NumPy lacks this type, so gates cannot compare the output"
            raise UserError(what, where="export", why=why, remedy="Return output.float().")
    return list(values)


def _wrap(model: Any, names: Collection[str], call: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """Return a module that takes inputs by position and passes them on by name.

    The inputs are in the order of `names`.
    """
    torch: Any = importlib.import_module("torch")

    class Named(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *tensors: Any) -> Any:
            return call(self.inner, dict(zip(names, tensors, strict=True)))

    return Named().eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's output, internal warnings and log messages."""
    known = [name for name in logging.Logger.manager.loggerDict if name.partition(".")[0] in _NOISY]
    # A logger without a level inherits it from its nearest ancestor with a level, so it is left
    # out. Setting the level of a logger empties the caches of all loggers.
    loggers = [
        logger
        for name in {*_NOISY, *known}
        if (logger := logging.getLogger(name)).level or name in _NOISY
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        quiet = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings(
                "ignore", message="The tensor attributes? .* assigned during export"
            )
            warnings.filterwarnings(
                "ignore", message="# The axis name: .* will not be used, since it shares"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


KERAS_FILE = "model.keras"


class KerasExporter(TorchExporter):
    """Exporter of Keras 3 models on the PyTorch backend.

    Models that were saved with other backends can be loaded too.
    """

    tools = ("keras", *TorchExporter.tools)

    def save(self, model: object, folder: Path) -> None:
        """Write the model as `.keras`."""
        keras = import_keras("torch")
        if not isinstance(model, keras.Model):
            raise UserError(
                f"{type(model).__name__} is not a keras.Model",
                where="train.run",
                remedy="`train.run` must return a Keras model.",
            )
        model.save(folder / KERAS_FILE)

    def load(self, folder: Path) -> object:
        """Load the only `.keras` file of a folder as a PyTorch module."""
        import_keras("torch")
        return load_keras(find_file_with_suffix(folder, ".keras")).eval()

    def _call(self, module: Any, rows: Mapping[str, Any]) -> Any:
        return call_keras(module, rows)

    def _module(self, model: Any, request: ExportRequest) -> Any:
        check_keras_inputs(model, request.samples)
        return (
            model if len(request.samples) == 1 else _wrap(model, tuple(request.samples), self._call)
        )


TRANSFORMERS_CONFIG = "config.json"


class HuggingfaceExporter(TorchExporter):
    """Exporter of transformers models.

    The data set's `inputs:` are names of arguments of `forward`. The outputs are the tensors that
    `forward` returns.
    """

    tools = ("transformers", *TorchExporter.tools)

    def save(self, model: object, folder: Path) -> None:
        """Write the model with `save_pretrained`."""
        if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            remedy = (
                "`train.run` must return a PreTrainedModel. "
                "For other modules, set export.framework: torch."
            )
            raise UserError(
                f"{type(model).__name__} is not a model of transformers",
                where="train.run",
                remedy=remedy,
            )
        if getattr(importlib.import_module("transformers"), type(model).__name__, None) is not type(
            model
        ):
            raise UserError(
                f"{type(model).__name__} is not a class of transformers",
                where="train.run",
                why="the files of save_pretrained contain no code, so the class must be in "
                "transformers",
                remedy="Set export.framework: torch, which accepts modules of any class.",
            )
        model.save_pretrained(folder)

    def load(self, folder: Path) -> object:
        """Return the model in a `save_pretrained` folder, without network access.

        Python code in the folder is not run.

        Raises:
            NotFoundError: the folder has no `config.json`.
            UserError: `config.json` does not name exactly one architecture of the installed
                transformers.
        """
        transformers = importlib.import_module("transformers")
        if not (folder / TRANSFORMERS_CONFIG).is_file():
            raise NotFoundError(
                "no config.json",
                where=str(folder),
                remedy="Set `model:` to a folder that save_pretrained has written.",
            )
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        names = config.architectures or []
        if len(names) != 1 or not hasattr(transformers, names[0]):
            remedy = (
                "Install the version of transformers that wrote the folder, or correct the file."
            )
            raise UserError(
                "the file must name exactly one architecture of the installed transformers",
                where="config.json",
                why=f"it names {', '.join(names) or 'none'}",
                remedy=remedy,
            )
        model_class = getattr(transformers, names[0])
        return model_class.from_pretrained(
            folder, local_files_only=True, attn_implementation="eager"
        ).eval()

    def _call(self, module: Any, rows: Mapping[str, Any]) -> Any:
        """Call the model without a cache; return its tensors by name."""
        torch: Any = importlib.import_module("torch")
        extra = {"use_cache": False} if "use_cache" in vars(module.config) else {}
        answer = module(**rows, **extra, return_dict=True)
        return {name: value for name, value in answer.items() if isinstance(value, torch.Tensor)}

    def _module(self, model: Any, request: ExportRequest) -> Any:
        """Return the wrapped module after a check that `forward` names every input.

        The check is necessary, since `forward` ignores other inputs in its `**kwargs`.
        """
        owner = f"`forward` of {type(model).__name__}"
        bind_call(
            model.forward, request.samples, owner=owner, ordered=request.ordered, renamed=False
        )
        return _wrap(model, tuple(request.samples), self._call)
