"""A small pipeline, a table-driven probe, and a handler that counts its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes, digest_json
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.gate import LatencyGate, SizeGate
from onnx_ops.domain.pipeline import (
    Benchmark,
    Calibrate,
    DataSection,
    Deploy,
    Export,
    FileData,
    Pipeline,
    PluginData,
    Quantize,
    Register,
    SklearnData,
    Train,
)
from onnx_ops.domain.plan import Stage, StageKind, StageOutcome
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.pipeline import UserCode
from onnx_ops.pipeline.probe import ProjectProbe
from onnx_ops.ports import Observer, Work

TARGETS = {name: Target(name=name) for name in ("cpu", "edge")}

PIPELINE = Pipeline(
    pipeline="digits",
    data={
        "train": SklearnData(sklearn="digits", split="train"),
        "test": FileData(file="test.npz", inputs={"x": "x"}, label="y"),
        "extra": PluginData(source="lake", options={"deep": [1, {"a": None}]}, inputs={"x": "x"}),
    },
    train=Train(run="model:train", with_={"epochs": 3, "rate": 0.5}),
    export=Export(framework="sklearn", dynamic={"x": {0: "batch"}}),
    quantize=(
        Quantize(name="int8-dynamic", method="dynamic"),
        Quantize(name="int8-static", method="static", calibrate=Calibrate(data="train")),
    ),
    benchmark=Benchmark(targets=("cpu", "edge")),
    gates=(SizeGate(max=1000), LatencyGate(max_regression=0.05)),
    register=Register(model="digits", promote="auto"),
    deploy=(
        Deploy(
            endpoint="digits",
            target="cpu",
            rollout=RolloutPolicy(steps=(0.1, 1.0)),
            options={"port": 8000},
        ),
        Deploy(endpoint="digits-edge", target="edge"),
    ),
)


@dataclass(frozen=True)
class TableProbe(ProjectProbe):
    """A probe with the state of the world in its fields, which a test can change."""

    context: Any = None
    world: dict[str, str] = field(default_factory=dict)
    key: Digest | None = field(default_factory=lambda: digest_bytes(b"key"))

    def data(self, section: DataSection) -> str:
        return self.world.get("data", "data") + type(section).__name__

    def origin(self, section: DataSection) -> Mapping[str, str]:
        origin = self.world.get("origin", "")
        return {"kind": "dvc", "commit": origin} if origin else {}

    def code(self, reference: str, depends: tuple[str, ...] = ()) -> UserCode:
        digest = digest_json([reference, list(depends), self.world.get("code", "")])
        return UserCode(
            files={"code": digest}, packages={"library": self.world.get("library", "1.0")}
        )

    def model(self, path: str) -> Digest:
        return digest_bytes(path.encode())

    def tools(
        self, kind: str, name: str, env: Environment | None = None, *, trains: bool = False
    ) -> Mapping[str, str]:
        return {name: self.world.get(f"{kind}/{name}", "1.0"), "trains": str(trains)}

    def inline_files(self, entry: Quantize) -> Quantize:
        return entry

    def is_quantizer(self, entry: Quantize) -> bool:
        return entry.method in ("dynamic", "static")

    def hardware(self, target: Target) -> Digest:
        return digest_bytes(self.world.get("hardware", "h").encode())

    def arithmetic(self, target: Target) -> Arithmetic:
        return Arithmetic(
            family="x86", saturates=self.world.get(f"{target.name}/vnni", "yes") == "no"
        )

    def signer(self) -> Digest | None:
        return self.key


@dataclass
class CountingHandler:
    """A handler whose results depend on the stage's key only.

    It raises the `errors` instead, one after another.
    """

    results: dict[Digest, Manifest] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    errors: dict[str, list[OnnxOpsError | OSError]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, OnnxOpsError] = field(default_factory=dict)
    elsewhere: dict[str, Manifest] = field(default_factory=dict)

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        if stage.id in self.unreadable:
            raise self.unreadable[stage.id]
        return self.results.get(key)

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        return self.refusals.get(stage.id, "")

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Store the result that another run has made since the first cache check.

        `elsewhere` contains such results by stage.
        """
        if stage.id in self.elsewhere:
            self.results[key] = self.elsewhere[stage.id]
        return nullcontext()

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        self.calls.append(stage.id)
        if waiting := self.errors.get(stage.id):
            raise waiting.pop(0)
        self.results[key] = Manifest(files={"result": digest_json([key, stage.kind.value])})
        return self.results[key]

    def decision(self, manifest: Manifest) -> Decision | None:
        return None


class Watching(Observer):
    """An executor and observer that records its calls."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.events: list[str] = []

    def run(
        self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]
    ) -> Manifest:
        return work()

    def show(
        self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]
    ) -> None:
        self.shown.append(f"{stage.id} {outcome.status.value}")

    def planned(self, plan: object) -> None:
        self.events.append("planned")

    def started(self, stage: Stage) -> None:
        self.events.append(f"started {stage.id}")

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        self.events.append(f"{outcome.status.value} {stage.id}")


def ids(stages: tuple[Stage, ...], kind: StageKind) -> list[str]:
    return [stage.id for stage in stages if stage.kind is kind]
