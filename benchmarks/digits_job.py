"""The data, the request and the publication of `bare.py`.

The data are those of the pipeline. The publication has no evidence and no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.artifact import digest_bytes, digest_folder
from onnx_ops.domain.pipeline import SklearnData
from onnx_ops.domain.release import Lineage, Publication, VariantRecord
from onnx_ops.ports import Tensors

TRAINING = SklearnData(sklearn="digits", split="train")
SCORED = SklearnData(sklearn="digits", split="test")
CALIBRATION_ROWS = 256


def feed(samples: Tensors) -> Tensors:
    return {name: array[:1] for name, array in samples.items()}


def publication(variants: Mapping[str, Path]) -> Publication:
    records = tuple(
        VariantRecord(
            variant=name,
            files={"model.onnx": path},
            manifest=digest_folder(path.parent),
            evidence={},
            metrics={},
            decisions={},
            signed={},
            description="",
        )
        for name, path in variants.items()
    )
    return Publication(
        model="digits-mlp",
        lineage=Lineage(pipeline="bare", release=digest_bytes(b"bare")),
        variants=records,
    )
