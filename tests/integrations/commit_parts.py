"""A small pipeline whose commits are judged."""

from __future__ import annotations

_PIPELINE = """
pipeline: iris
data:
  all: {{sklearn: iris}}
train: {{run: "{train}"}}
export: {{framework: sklearn}}
validate: {{samples: {{data: all, limit: 150}}}}
benchmark: {{targets: [cpu-1t]}}
gates:
  - {{kind: parity}}
  - {{kind: size, max: {size}}}
"""


def pipeline_text(train: str, size: str = "1 MB") -> str:
    """Return a pipeline with this training function, whose model is limited to `size`."""
    return _PIPELINE.format(train=train, size=size)
