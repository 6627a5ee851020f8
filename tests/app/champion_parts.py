"""A champion over fakes, with everything that its decision is based on.

Tests of the recheck of champions use it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.app.champions import save_benchmark
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.ports import Context
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import CHAMPION, MODEL, TARGET, publish_file
from tests.statistics.test_statistics_judge import GATES, INT8, counts
from tests.statistics.test_statistics_judge import against as compared

AS_IT_WAS = replace(
    INT8, baseline="", comparisons=(compared("fp32", 0.7),), metrics=(counts(""), counts("fp32"))
)
SLOWER = replace(
    AS_IT_WAS,
    comparisons=(compared("fp32", 1.3),),
    hardware=replace(INT8.hardware, runtime_version="2"),
)

_COUNT = itertools.count()


@dataclass
class ChampionScene:
    """A scene in which version 1 is champion.

    `now` are the results of the measurements, one after the other. The last one is repeated
    forever.
    """

    root: Path
    now: Sequence[Evidence] = (AS_IT_WAS,)
    world: FakeWorld = field(default_factory=FakeWorld)
    asked: list[tuple[Stage, Digest, Mapping[str, Manifest]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context: Context = self.world.context(root=self.root)
        store = self.context.store
        self.stage = Stage(
            id=f"benchmark/int8@{TARGET}",
            kind=StageKind.BENCHMARK,
            settings={"seed": 1},
            variant="int8",
            target=TARGET,
        )
        self.inputs = {"export": Manifest(files={"model.onnx": store.put_bytes(b"export")})}
        self.key = digest_bytes(b"key")
        # Each scene stores evidence with another digest, so that it never finds the benchmark of
        # another scene.
        self.evidence = store.put_bytes(
            codec.dumps(replace(INT8, conditions={"scene": str(next(_COUNT))}))
        )
        gates = store.put_bytes(codec.dumps(GATES))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            file.write_text("int8")
            decided = {"evidence": self.evidence, "gates_digest": gates}
            publish_file(self.world, file, digest_bytes(b"a"), variant="int8", **decided)
        self.world.registry.set_alias(MODEL, CHAMPION, "1")

    def remembered(self) -> ChampionScene:
        save_benchmark(self.context.store, self.stage, self.key, self.inputs, self.evidence)
        return self

    def perform(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        found = self.now[min(len(self.asked), len(self.now) - 1)]
        self.asked.append((stage, key, inputs))
        return Manifest(files={"evidence.json": self.context.store.put_bytes(codec.dumps(found))})
