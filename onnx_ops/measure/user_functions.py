"""Load and call functions of the user's project by reference.

Isolated environments import this module too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.errors import NotFoundError, OnnxOpsError, StageError, UserError, describe_error
from onnx_ops.plugins import imported, missing_package

CUSTOM_METRIC = (
    "With `onnx-ops judge`, use a metric of your own: `--metric package.module:function`."
)
"""Remedy of `onnx-ops judge`, which cannot set the keys of a metric."""


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """Make the project's modules importable while functions are called and unpickled."""
    text = str(root)
    added = text not in sys.path
    if added:
        sys.path.insert(0, text)
    try:
        yield
    finally:
        if added:
            sys.path.remove(text)


def load_function(reference: str, where: str) -> Callable[..., Any]:
    """Return the function with the reference `package.module:function`.

    Raises:
        MissingPackageError: there is no such module, or a package that it imports is missing.
        NotFoundError: the module has no such function.
        UserError: the module raises an error.
        StageError: the module raises OSError.
    """
    module_name, _, function_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        why = f"{reference} cannot be imported: there is no module {error.name}"
        raise missing_package(imported(error), where=where, why=why) from error
    except Exception as error:
        # The import runs the code of the module, which can raise any exception.
        raise _failed(f"{module_name} cannot be imported", error) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise NotFoundError(f"{module_name} has no {function_name}", where=where)
    return function


def load_functions(references: Iterable[str], where: str) -> dict[str, Callable[..., Any]]:
    """Return functions by their references, as `load_function` does."""
    return {reference: load_function(reference, where) for reference in dict.fromkeys(references)}


def call_training(reference: str, data: Mapping[str, Any], parameters: Mapping[str, Any]) -> object:
    """Return the model that the training function returns.

    Errors are those of `load_function`, and the following.

    Raises:
        UserError: the function has other parameters, raises an error, or returns None.
        StageError: the function raises OSError, an error of the machine or of a service.
    """
    function = load_function(reference, "train.run")
    data_sets = [_DataSets(data)] if _takes_data(function) else []
    try:
        inspect.signature(function).bind(*data_sets, **parameters)
    except TypeError as error:
        remedy = "Set exactly its parameters in `train.with`."
        raise UserError(
            f"{reference} cannot be called: {error}", where="train.with", remedy=remedy
        ) from error
    except ValueError:  # A function written in C can lack a signature.
        pass
    try:
        model: object = function(*data_sets, **parameters)
    except (OnnxOpsError, MemoryError):  # Stages and commands report these errors.
        raise
    except Exception as error:
        raise _failed(f"{reference} failed", error) from error
    if model is None:
        raise UserError(
            f"{reference} returned nothing",
            where="train.run",
            remedy="Make it return the trained model.",
        )
    return model


def call_function(function: Callable[..., Any], reference: str, *arguments: Any, on: str) -> Any:
    """Return the result of a function of the project.

    Args:
        reference: reference of the function, for the error.
        on: the file or row that the function gets, for the error.

    Raises:
        UserError: the function raises an error.
        StageError: the function raises OSError, an error of the machine or of a service.
    """
    try:
        return function(*arguments)
    except (OnnxOpsError, MemoryError):  # Stages and commands report these errors.
        raise
    except Exception as error:
        raise _failed(f"{reference} failed on {on}", error) from error


def takes_model(function: Callable[..., Any]) -> bool:
    """Return whether a function of the project has a parameter `model`."""
    try:
        return "model" in inspect.signature(function).parameters
    except ValueError:  # A function written in C can lack a signature.
        return False


class _DataSets(dict[str, Any]):
    """The data sets that are passed to the training function."""

    def __missing__(self, name: str) -> Any:
        raise UserError(
            f"training read the data set {name!r}, which it does not receive",
            where="train.run",
            why="training receives every data set under `data` except that of validate.samples, "
            "since a model trained with its rows would pass too easily",
            remedy=f"It receives {', '.join(map(repr, self)) or 'none'}. "
            "Declare a data set with other rows under `data`.",
        )


def _takes_data(function: Callable[..., Any]) -> bool:
    """Return whether a training function has a positional parameter.

    A function without positional parameters loads the data.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A function written in C can lack a signature.
        return True
    return any(
        parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
        for parameter in parameters
    )


def _failed(what: str, error: Exception) -> OnnxOpsError:
    """Return an error that names the failing line of the project.

    Lines of called libraries are omitted.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_shown_path(error.filename)}:{error.lineno}"
    else:
        # The line must be in the user's code: lines of Python's library or of onnx-ops do not help
        # the user.
        libraries = (
            Path(sysconfig.get_path("stdlib")),
            Path(__file__).parents[1],
        )
        own = [
            frame
            for frame in frames
            if not frame.filename.startswith("<")
            and {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)
            and not any(Path(frame.filename).is_relative_to(library) for library in libraries)
        ] or frames[-1:]
        place = f"{_shown_path(own[-1].filename)}:{own[-1].lineno}"
    kind = StageError if isinstance(error, OSError) else UserError
    why = describe_error(error)
    return kind(
        what,
        where=place,
        why=why,
        remedy="Correct the code at that line, its data, or the cause that the reason names. "
        "Then run again.",
    )


def _shown_path(filename: str) -> str:
    """Return a path relative to the working directory, if it is below that directory."""
    path = Path(filename)
    return (
        str(path.resolve().relative_to(Path.cwd()))
        if path.resolve().is_relative_to(Path.cwd())
        else filename
    )
