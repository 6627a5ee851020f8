"""Search for the code of `forward` that fixes the size of a free axis.

The search finds the layer and the line of code.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch


class FixedAxis(NamedTuple):
    """An axis of an input that the module fixes, its size, and the place in the code."""

    name: str
    axis: int
    size: int
    place: str


def find_fixed_axes(
    module: Any,
    positional: Sequence[Any],
    keyword: Mapping[str, Any],
    dynamic_shapes: Any,
    free: Mapping[str, Mapping[int, str]],
) -> list[FixedAxis]:
    """Trace the module again; return the free axes that the module fixes.

    Exceptions of the module are ignored, since the export has already failed.

    Args:
        positional, keyword: arguments of the module's call.
        dynamic_shapes: names of free axes as `torch.onnx.export` takes them.
        free: the same names by the names of the inputs, in the order of the arguments.
    """
    watch = _AxisWatch(module, free, tuple(keyword))
    with contextlib.suppress(Exception), watch.watching():
        torch.export.export(
            module,
            tuple(positional),
            dict(keyword),
            dynamic_shapes=_permit_fixed(dynamic_shapes),
            strict=False,
        )
    return watch.fixed


def _permit_fixed(dynamic_shapes: Any) -> Any:
    """Replace the names of axes by `Dim.AUTO`, which permits that an axis is fixed."""
    if isinstance(dynamic_shapes, Mapping):
        return {key: _permit_fixed(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, tuple | list):
        return type(dynamic_shapes)(_permit_fixed(value) for value in dynamic_shapes)
    return torch.export.Dim.AUTO if isinstance(dynamic_shapes, str) else dynamic_shapes


class _AxisWatch:
    """Observer of the sizes of inputs during a trace.

    The observer compares the sizes before and after each layer, and after each line of `forward`.
    `fixed` contains the axes whose size has become a number, in the order of their detection.
    """

    def __init__(
        self, module: Any, free: Mapping[str, Mapping[int, str]], keywords: tuple[str, ...]
    ) -> None:
        self.fixed: list[FixedAxis] = []
        self._module, self._free, self._keywords = module, free, keywords
        self._sizes: dict[tuple[str, int], Any] = {}
        self._layers: list[str] = []
        self._line = ""
        self._root = str(Path(torch.__file__).parent)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe layers by hooks, and lines by the interpreter's trace function."""
        handles = [
            self._module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        ]
        for name, layer in self._module.named_modules():
            text = _describe_layer(name, layer)
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
        for (name, axes), tensor in zip(self._free.items(), tensors, strict=True):
            self._sizes |= {(name, axis): tensor.shape[axis] for axis in axes}

    def _enter(self, layer: str) -> None:
        self._compare()
        self._layers.append(layer)

    def _leave(self) -> None:
        self._compare()
        self._layers.pop()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Follow the lines of `forward`, and of `call` in Keras.

        Keras calls layers without torch's hooks, so layers are recorded here.
        """
        code = frame.f_code
        if code.co_name not in ("forward", "call") or code.co_filename.startswith(self._root):
            return None
        self._compare()
        layer = frame.f_locals.get("self")
        if code.co_name == "call" and isinstance(layer, torch.nn.Module):
            if event == "call":
                self._layers.append(_describe_layer(getattr(layer, "name", ""), layer))
            elif event == "return":
                self._layers.pop()
        if event == "line":
            source = linecache.getline(code.co_filename, frame.f_lineno).strip()
            self._line = f"{Path(code.co_filename).name}, line {frame.f_lineno}: `{source}`"
        return self._trace

    def _compare(self) -> None:
        for (name, axis), size in list(self._sizes.items()):
            number = size if isinstance(size, int) else size.node.maybe_as_int()
            if number is not None:
                del self._sizes[name, axis]
                place = ", ".join(
                    part for part in (self._layers[-1] if self._layers else "", self._line) if part
                )
                self.fixed.append(FixedAxis(name, axis, number, place))


def _describe_layer(name: str, layer: Any) -> str:
    kind = type(layer).__name__
    return f"layer {name} ({kind})" if name else f"`forward` of {kind}"
