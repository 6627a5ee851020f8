"""The plan of a pipeline: its stages, and their outcomes in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from onnx_ops.domain.artifact import Digest, Manifest, digest_json
from onnx_ops.domain.quantities import Json


class StageKind(StrEnum):
    """Kinds of stages."""

    DATA = "data"
    TAGS = "tags"
    TRAIN = "train"
    EXPORT = "export"
    VALIDATE = "validate"
    SYSTEM = "system"
    SEARCH = "search"
    CALIBRATE = "calibrate"
    QUANTIZE = "quantize"
    SCORE = "score"
    BENCHMARK = "benchmark"
    GATE = "gate"
    REGISTER = "register"
    PROMOTE = "promote"
    DEPLOY = "deploy"


PLACEABLE = (
    StageKind.TRAIN,
    StageKind.EXPORT,
    StageKind.VALIDATE,
    StageKind.SEARCH,
    StageKind.CALIBRATE,
    StageKind.QUANTIZE,
    StageKind.SCORE,
    StageKind.BENCHMARK,
)
"""Stages that can run on another machine.

Keys and credentials of the other stages stay on this machine.
"""

MEASURED = (StageKind.SCORE, StageKind.BENCHMARK)
"""Stages whose result names the machine that measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a plan, applied to one variant and target where it fans out.

    `settings` is everything in the pipeline that affects the result. `tools` are the versions of
    the packages that affect it. `needs` names the stages whose manifests are the inputs of this
    stage; it runs only if they exist. `tolerates` names further stages for which this stage waits;
    it uses their manifests if they succeeded. `hints` affect only how the stage runs, and are not
    part of the key. `timeout` is in seconds, and `memory` in bytes. `own_process`
    requests a separate process.
    """

    id: str
    kind: StageKind
    settings: Mapping[str, Json]
    needs: tuple[str, ...] = ()
    tolerates: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)
    variant: str | None = None
    target: str | None = None
    retries: int = 0
    timeout: float | None = None
    memory: int | None = None
    own_process: bool = False
    hints: Mapping[str, Json] = field(default_factory=dict)

    def key(self, inputs: Mapping[str, Manifest]) -> Digest:
        """Return the digest that names the result of the stage.

        The digest covers the stage's kind, variant, target, settings and tools, and the content of
        its inputs.
        """
        return digest_json(
            {
                "kind": self.kind.value,
                "variant": self.variant,
                "target": self.target,
                "settings": self.settings,
                "tools": dict(self.tools),
                "inputs": {name: manifest.digest() for name, manifest in inputs.items()},
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in an order in which every stage comes after those it needs."""

    pipeline: str
    stages: tuple[Stage, ...]

    def __getitem__(self, stage_id: str) -> Stage:
        for stage in self.stages:
            if stage.id == stage_id:
                return stage
        raise KeyError(stage_id)


class StageStatus(StrEnum):
    """How a stage ended in a run."""

    CACHED = "cached"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """The outcome of one stage in one run. `reason` explains a failure or a skip."""

    stage: str
    status: StageStatus
    key: Digest | None = None
    manifest: Manifest | None = None
    seconds: float = 0.0
    reason: str = ""
