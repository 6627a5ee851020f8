"""What the place of a target rules out: a pool's machines, a phone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx_ops.config.document import Finding
from onnx_ops.config.draft import Draft
from onnx_ops.domain.quantization import AUTO
from onnx_ops.domain.target import Target


def pool_findings(draft: Draft, targets: Mapping[str, Target]) -> Iterator[Finding]:
    """What needs the machine at hand, on targets whose machine is elsewhere."""
    for name, target in targets.items():
        if not target.pool:
            continue
        for loc, entry in draft.quantize:
            if entry.method == AUTO:
                message = f"method: auto times what it tries on this machine, and '{name}' is measured by a pool"
                yield Finding(loc=(*loc, "method"), message=f"{message}; name the recipe, or leave the target out")
        if target.custom_ops:
            message = f"'{name}' is measured by a pool, whose machines have no libraries of custom operators yet"
            yield Finding(loc=("benchmark", "targets"), message=message)


def device_findings(draft: Draft, targets: Mapping[str, Target]) -> Iterator[Finding]:
    """Endpoints of targets that get another file than the ONNX model."""
    for loc, entry in draft.deploy:
        target = targets.get(entry.target)
        if target is not None and target.ort_format is not None:
            message = f"'{entry.target}' gets an .ort file, and endpoints serve ONNX files: take it from the registry"
            yield Finding(loc=(*loc, "target"), message=message)
