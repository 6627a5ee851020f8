"""The project's own code, by reference."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.errors import NotFound, OnnxOpsError, StageFailure, UserError, quoted
from onnx_ops.plugins import imported, missing_package


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """Lets the project's own modules be imported, for calling them and for reading what training pickled."""
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
    """The function that `package.module:function` names; its module runs when it is imported.

    Raises:
        MissingPackage: a package that it imports is not installed.
        NotFound: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = reference.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        why = f"{reference} cannot be imported: there is no module {error.name}"
        raise missing_package(imported(error), where=where, why=why) from error
    except Exception as error:  # a module's own code runs when it is imported
        why = f"{type(error).__name__}: {error}"
        raise NotFound(f"cannot import {reference}", where=where, why=why) from error
    return found


def call_training(reference: str, data: Mapping[str, Any], parameters: Mapping[str, Any]) -> object:
    """Return the model that the training function returns.

    Raises:
        UserError: it does not take the parameters, or fails.
        StageFailure: it fails with an error of the operating system.
    """
    function = load_function(reference, "train.run")
    _check_parameters(function, reference, data, parameters)
    try:
        return function(data, **parameters)
    except (OnnxOpsError, MemoryError):  # who runs it knows its limit
        raise
    except Exception as error:
        kind = StageFailure if isinstance(error, OSError) else UserError  # a network or a disk may work the next time
        raise kind(
            f"{reference} raised {type(error).__name__}: {quoted(error)}",
            where=_place(error, function),
            remedy="The training function is the project's own; mend it and run again.",
        ) from error


def _check_parameters(
    function: Callable[..., Any], reference: str, data: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that does not tell it
        return
    try:
        signature.bind(data, **parameters)
    except TypeError as error:
        raise UserError(
            f"{reference} does not take these parameters: {error}",
            where="train.with",
            why=f"beside the data it takes {', '.join(list(signature.parameters)[1:]) or 'none'}",
            remedy="Change `train.with`, or the function.",
        ) from error


def _place(error: Exception, function: Callable[..., Any]) -> str:
    """Return file and line of the deepest frame that is the project's own, which a person can mend."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "")
    own = [frame for frame in frames if _is_own(frame.filename) or frame.filename == file]
    return f"{_shown(own[-1].filename)}:{own[-1].lineno}" if own else "train.run"


def _is_own(file: str) -> bool:
    path = Path(file)
    return "site-packages" not in path.parts and path.is_relative_to(Path.cwd())


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
