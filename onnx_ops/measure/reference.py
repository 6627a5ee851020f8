"""The source model's answers on real, edge, batch, size and non-finite inputs: what an export is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.measure.files import pack, unpack
from onnx_ops.ports import Store, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGroup:
    """Inputs and the source's outputs on them, by ONNX names; a precision is None if the source has none.

    `bounds` are those of a source that jumps, as `statistics.jitter.envelope` gives them; None for any other. `inside`
    says whether callers can send such inputs.
    """

    name: str
    inputs: Tensors
    single: Tensors | None
    double: Tensors | None
    bounds: Tensors | None = None
    inside: bool = True

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that the source answers."""
        return tuple(self.double or self.single or {})


_PARTS = ("input", "float32", "float64", "bounds")
_INSIDE = "inside"


def put_reference(store: Store, groups: list[ReferenceGroup]) -> Digest:
    import numpy as np

    arrays: dict[str, Any] = {}
    for group in groups:
        for part, tensors in zip(_PARTS, (group.inputs, group.single, group.double, group.bounds), strict=True):
            arrays |= {f"{group.name}|{part}|{name}": array for name, array in (tensors or {}).items()}
        arrays[f"{group.name}|{_INSIDE}|"] = np.array(group.inside)
    return store.put_bytes(pack(arrays))


def get_reference(store: Store, digest: Digest) -> list[ReferenceGroup]:
    """The groups in the order of the archive, which is not that in which they were asked."""
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    for name, array in unpack(store, digest).items():
        group, part, tensor = name.split("|", 2)
        parts.setdefault(group, {}).setdefault(part, {})[tensor] = array
    return [
        ReferenceGroup(
            name=name,
            inputs=p["input"],
            single=p.get("float32"),
            double=p.get("float64"),
            bounds=p.get("bounds"),
            inside=bool(p[_INSIDE][""]),
        )
        for name, p in parts.items()
    ]
