"""Find the layer and the line of `forward` that fix the size of an axis which should be free."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

AUTOMATIC = torch.export.Dim.AUTO
"""Size of an axis that the trace keeps free where it can."""


class FixedAxis(NamedTuple):
    """An axis of an input that the module fixes: its size, and the place that does so in words."""

    name: str
    axis: int
    size: int
    place: str


def find_fixed_axes(
    module: Any,
    positional: Sequence[Any],
    keyword: Mapping[str, Any],
    free: Sequence[tuple[str, Mapping[int, str]]],
    dynamic_shapes: Mapping[str, Any],
) -> list[FixedAxis]:
    """Trace the module once more, and return the axes that it fixes, with their causes.

    Exceptions of the module are those of the export that has failed already, and are ignored.

    Args:
        free: the names of the inputs and their free axes, in the order of the arguments.
        dynamic_shapes: the same by parameter of `forward`, as `torch.export.export` takes them, with automatic sizes.
    """
    watch = _Watch(module, free, tuple(keyword))
    with contextlib.suppress(Exception), watch.watching():
        torch.export.export(module, tuple(positional), dict(keyword), dynamic_shapes=dict(dynamic_shapes))
    return watch.fixed


class _Watch:
    """Compares the sizes of the inputs before and after each layer, and after each line of their `forward`.

    `fixed` are the axes whose size is a number, in the order in which they became one.
    """

    def __init__(self, module: Any, free: Sequence[tuple[str, Mapping[int, str]]], keywords: tuple[str, ...]) -> None:
        self.fixed: list[FixedAxis] = []
        self._module, self._free, self._keywords = module, free, keywords
        self._sizes: dict[tuple[str, int], Any] = {}
        self._layers: list[str] = []
        self._line = ""
        root = str(Path(torch.__file__).parent)
        codes = (getattr(inspect.unwrap(type(layer).forward), "__code__", None) for layer in module.modules())
        self._files = {code.co_filename for code in codes if isinstance(code, CodeType)}
        self._files = {file for file in self._files if not file.startswith(root)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the layers by hooks, and the lines by the interpreter's trace function."""
        handles = [self._module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        for name, layer in self._module.named_modules():
            text = f"layer {name} ({type(layer).__name__})" if name else f"`forward` of {type(layer).__name__}"
            handles.append(layer.register_forward_pre_hook(lambda *_, text=text: self._enter(text)))
            handles.append(layer.register_forward_hook(lambda *_: self._leave(), always_call=True))
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
            for handle in handles:
                handle.remove()

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = (*args, *(kwargs[name] for name in self._keywords))
        for (name, axes), tensor in zip(self._free, tensors, strict=True):
            self._sizes |= {(name, axis): tensor.shape[axis] for axis in axes}

    def _enter(self, layer: str) -> None:
        self._compare()
        self._layers.append(layer)

    def _leave(self) -> None:
        self._compare()
        self._layers.pop()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        self._compare()
        if event == "line":
            file, number = frame.f_code.co_filename, frame.f_lineno
            self._line = f"{Path(file).name}, line {number}: `{linecache.getline(file, number).strip()}`"
        return self._trace

    def _compare(self) -> None:
        for (name, axis), size in list(self._sizes.items()):
            number = size if isinstance(size, int) else size.node.maybe_as_int()
            if number is not None:
                del self._sizes[name, axis]
                place = ", ".join(part for part in (self._layers[-1] if self._layers else "", self._line) if part)
                self.fixed.append(FixedAxis(name, axis, number, place))
