"""A project of synthetic plugins, with any number of pipelines and targets.

The number of variants is free too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from synthetic_plugins import CLASSES, FEATURES

from onnx_ops.app.project import PreparedPipeline
from onnx_ops.domain.plan import Plan

ROWS = 64

_PIPELINE = """\
pipeline: {name}
data:
  train: {{file: data/train.npz, inputs: {{x: x}}, label: y}}
  test: {{file: data/test.npz, inputs: {{x: x}}, label: y}}
train: {{run: "synthetic_job:train", with: {{seed: {seed}}}}}
export: {{framework: synthetic}}
quantize: [{quantize}]
benchmark: {{targets: [{targets}]}}
gates:
  - {{kind: parity}}
  - {{kind: latency, max_regression: 5%}}
  - {{kind: size, max: 1 MB}}
"""


def write_project(root: Path, *, pipelines: int, variants: int, targets: int) -> list[Path]:
    """Write the project into a folder, and return its pipeline files.

    `variants` includes the export.
    """
    for folder in ("configs/targets", "configs/pipelines", "data"):
        (root / folder).mkdir(parents=True)
    (root / "onnx-ops.toml").write_text('signing = "off"\n', encoding="utf-8")
    (root / "synthetic_job.py").write_text(
        "from synthetic_plugins import train\n", encoding="utf-8"
    )
    draw = np.random.default_rng(0)
    for name in ("train", "test"):
        rows = draw.standard_normal((ROWS, FEATURES)).astype(np.float32)
        np.savez(root / "data" / f"{name}.npz", x=rows, y=draw.integers(0, CLASSES, ROWS))
    names = [f"machine-{number}" for number in range(targets)]
    for number, name in enumerate(names, start=1):
        text = f"name: {name}\nruntime: synthetic\nsession: {{intra_op_threads: {number}}}\n"
        (root / "configs" / "targets" / f"{name}.yaml").write_text(text, encoding="utf-8")
    copies = ", ".join(
        f"{{name: copy-{number}, method: synthetic}}" for number in range(1, variants)
    )
    return [_write(root, number, copies, ", ".join(names)) for number in range(pipelines)]


def _write(root: Path, number: int, quantize: str, targets: str) -> Path:
    file = root / "configs" / "pipelines" / f"p{number:04}.yaml"
    file.write_text(
        _PIPELINE.format(name=file.stem, seed=number, quantize=quantize, targets=targets),
        encoding="utf-8",
    )
    return file


def in_this_process(prepared: PreparedPipeline) -> PreparedPipeline:
    """Return the same plan with all stages in this process.

    What is left is the work of onnx-ops.
    """
    stages = tuple(replace(stage, own_process=False) for stage in prepared.plan.stages)
    return replace(prepared, plan=Plan(pipeline=prepared.plan.pipeline, stages=stages))
