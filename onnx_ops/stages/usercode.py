"""The project's own code, by reference."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.errors import NotFound, OnnxOpsError, StageFailure
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
    """The model that the training function returns; raises StageFailure with its own words if it fails."""
    function = load_function(reference, "train.run")
    try:
        return function(data, **parameters)
    except (OnnxOpsError, MemoryError):  # who runs it knows its limit
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise StageFailure(
            f"{reference} raised {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}",
            remedy="The training function is the project's own; mend it and run again.",
        ) from error
