"""Write Python source that rebuilds a model exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.errors import StageError
from onnx_ops.onnx_graph.files import parse_model, refuse_ort

if TYPE_CHECKING:
    from google.protobuf.message import Message

WEIGHTS = ".weights"
"""Suffix that is added to the source's name for the file with large constants."""

_INLINE = 64
"""Maximum size in bytes of raw data in the source.

Larger data is in the weights file.
"""

_WIDTH = 100

_HEAD = '''# Builds {name!r} anew: python THIS_FILE OUTPUT.onnx

from pathlib import Path
import sys

from onnx import {types}  # fmt: skip

WEIGHTS = Path(__file__).with_name({weights!r})


def stored(start, length):
    """Bytes of a large constant, from the file beside this one."""
    with WEIGHTS.open("rb") as stream:
        stream.seek(start)
        return stream.read(length)


def build():
    return {model}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python " + sys.argv[0] + " MODEL.onnx")
    Path(sys.argv[1]).write_bytes(build().SerializeToString(deterministic=True))
'''


class _Writer:
    """Renderer of protobuf messages as calls of their types, except large constants."""

    def __init__(self) -> None:
        self.weights = bytearray()
        self.types: set[str] = set()

    def render(self, message: Message, indent: int) -> str:
        kind = message.DESCRIPTOR
        name = kind.full_name.removeprefix("onnx.")
        self.types.add(name.partition(".")[0])
        parts = []
        for field, value in message.ListFields():
            if field.is_repeated:
                entries = [self._value(field, entry, indent + 8) for entry in value]
                parts.append(f"{field.name}={_laid_out('[', entries, ']', indent + 4)}")
            else:
                parts.append(f"{field.name}={self._value(field, value, indent + 4)}")
        return _laid_out(f"{name}(", parts, ")", indent)

    def _value(self, field: Any, value: Any, indent: int) -> str:
        if field.message_type is not None:
            return self.render(value, indent)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, bytes) and len(value) > _INLINE:
            start = len(self.weights)
            self.weights += value
            return f"stored({start}, {len(value)})"
        return repr(value)


def write_python_source(path: Path, source: Path) -> tuple[Path, ...]:
    """Write source that builds the model, and return the written files.

    The raw bytes of large constants are written beside the source. External weights are not copied:
    the built model refers to the same files as the original. The source is run, and its model is
    compared with the original, before this function returns. Errors are those of `parse_model`, and
    the following.

    Raises:
        UserError: the file is in ORT format.
        StageError: the source builds another model.
    """
    refuse_ort(path)
    model, writer = parse_model(path), _Writer()
    body = writer.render(model, 4)
    place = source.with_name(source.name + WEIGHTS)
    types = ", ".join(sorted(writer.types))
    text = _HEAD.format(name=path.name, types=types, weights=place.name, model=body)
    source.write_text(text, encoding="utf-8")
    if writer.weights:
        place.write_bytes(writer.weights)
    names: dict[str, Any] = {"__file__": str(source), "__name__": "rebuilt"}
    exec(compile(text, str(source), "exec"), names)  # noqa: S102 (it was just written from literals)
    if names["build"]().SerializeToString(deterministic=True) != model.SerializeToString(
        deterministic=True
    ):
        raise StageError("the source that was written builds another model", where=str(source))
    return (source, place) if writer.weights else (source,)


def _laid_out(head: str, parts: list[str], tail: str, indent: int) -> str:
    line = head + ", ".join(parts) + tail
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    return "\n".join(
        [head, *(f"{' ' * (indent + 4)}{part}," for part in parts), " " * indent + tail]
    )
