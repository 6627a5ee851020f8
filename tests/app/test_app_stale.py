"""No stale result and no needless work, for one edit at a time.

The tests check which stages a run executes again.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops import plugins
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import prepare
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.pipeline import InlineExecutor
from onnx_ops.pipeline import run as run_plan
from onnx_ops.pipeline.stages import execute as perform_stage
from onnx_ops.ports import Observer

FILES = {
    "onnx-ops.toml": 'signing = "auto"\n',
    "shop/__init__.py": "from shop.net import Net\n",
    "shop/net.py": "from .constants import FACTOR\n\nclass Net:\n    factor = FACTOR\n",
    "shop/constants.py": "FACTOR = 2\n",
    "shop/training.py": (
        "import yaml\nfrom shop import Net\n\ndef train(data, rate):\n    return Net()\n"
    ),
    "shop/table.json": "{}\n",
    "shop/unused.py": "from .net import Net\n",
    "judging/__init__.py": "",
    "judging/score.py": "from judging.parts import half\n\ndef score(predictions, "
    "labels):\n    return half(1.0)\n",
    "judging/parts.py": "def half(value):\n    return value / 2\n",
    "other.py": "def train(data):\n    ...\n",
    "params.yaml": "rate: 0.5\nother: 1\n",
    "README.md": "# Shop\n",
    "operators.so": "library",
    "configs/targets/cpu.yaml": "name: cpu\n",
    "configs/targets/edge.yaml": "name: edge\nsession: {intra_op_threads: 1}\n",
    "configs/targets/far.yaml": "name: far\n",
    "configs/pipelines/other.yaml": "pipeline: other\n",
    "shop.yaml": """\
pipeline: shop
description: Things.
data:
  train: {file: train.npz, inputs: {x: x}, label: y}
  test: {file: test.npz, inputs: {x: x}, label: y}
train: {run: "shop.training:train", with: {rate: "${params:rate}"}, depends: [shop/table.json]}
export: {framework: FRAMEWORK, opset: 18, ir_version: 10}
validate: {samples: {data: test, limit: 20}}
quantize:
  - {name: int8, method: dynamic}
  - {name: half, method: fp16}
benchmark: {targets: [cpu, edge]}
gates:
  - {kind: parity}
  - {kind: metric, use: "judging.score:score", higher_is_better: true, max_drop: 1%}
  - {kind: size, max: 1 MB}
objective: latency
register: {model: shop}
deploy:
  - {endpoint: shop, target: cpu, rollout: {steps: [10%, 100%]}}
""",
}

EVERY_GATE = {
    f"gate/{variant}@{target}" for variant in ("fp32", "int8", "half") for target in ("cpu", "edge")
}
JUDGED = EVERY_GATE | {"register"}
MEASURED = JUDGED | {gate.replace("gate", "benchmark") for gate in EVERY_GATE}
EXPORTED = MEASURED | {"export", "validate", "quantize/int8", "quantize/half"}
TRAINED = EXPORTED | {"train"}

NAMED = {
    "sklearn": "sklearn.linear_model._base",
    "xgboost": "xgboost.sklearn",
    "lightgbm": "lightgbm.sklearn",
    "torch": "torch.nn.modules.linear",
    "brought": "yaml.nodes",
    "keras": "keras.src.layers.core.dense",
    "huggingface": "transformers.models.bert.modeling_bert",
}
"""A module of the framework that a model's file names beside the user's class."""

BROUGHT = "brought"
"""Pseudo framework: a torch model that the pipeline brings.

Its file also names a class of PyYAML.
"""


def on(target: str, stages: set[str]) -> set[str]:
    return {stage for stage in stages if "@" not in stage or stage.endswith(f"@{target}")}


def of(variant: str, stages: set[str]) -> set[str]:
    return {
        stage
        for stage in stages
        if stage == "register" or f"/{variant}@" in stage or stage.endswith(f"/{variant}")
    }


@dataclass
class World:
    """A project in a folder, with simulated versions of packages."""

    project: Project
    framework: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.project.settings.root

    def write(self) -> None:
        """Restore every file, and remove added files."""
        for name, text in FILES.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text.replace("FRAMEWORK", self.framework))
        (self.root / "net.bin").write_text(
            f"cshop.net\nNet\nc{NAMED.get(self.framework, 'shop.net')}\nBase\n."
        )
        if self.framework == BROUGHT:
            path = self.root / "shop.yaml"
            path.write_text(
                re.sub("train: {run.*", "model: net.bin", path.read_text()).replace(
                    BROUGHT, "torch"
                )
            )
        (self.root / "shop" / "added.py").unlink(missing_ok=True)
        for name in ("train", "test"):
            self.save(name, 0.0)

    def save(self, name: str, shift: float, label: float = 0.0) -> None:
        x = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
        y = np.arange(30) % 2
        np.savez(self.root / f"{name}.npz", x=x + np.float32(shift), y=y + int(label), y2=1 - y)

    def run(self) -> set[str]:
        """Run the pipeline, and return the stages that were executed again.

        The result of a stage follows its key, and training gives the same bytes.
        """
        context = self.project.context

        def perform(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
            if stage.kind is StageKind.DATA:
                return perform_stage(stage, key, inputs, context)
            if stage.kind is StageKind.TRAIN:
                return Manifest(
                    files={"trained/model": context.store.put_file(self.root / "net.bin")}
                )
            return Manifest(files={"evidence.json": context.store.put_bytes(key.encode())})

        plan = prepare(self.project, self.root / "shop.yaml", until=StageKind.REGISTER).plan
        handler = replace(self.project.handler(), perform=perform, confirms=False)
        result = run_plan(
            plan,
            handler=handler,
            executor=InlineExecutor(),
            observer=Observer(),
            clock=self.project.context.clock,
        )
        assert not result.errors
        return set(result.executed())


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """Return one project for each exporter, which has run once."""
    made: dict[str, World] = {}
    real = plugins.version

    def world(framework: str) -> World:
        if framework not in made:
            root = tmp_path_factory.mktemp(framework)
            (root / "onnx-ops.toml").write_text(FILES["onnx-ops.toml"])
            made[framework] = World(open_project(root), framework)
            made[framework].write()
            assert made[framework].run() == {"data/train", "data/test"} | TRAINED
        versions = made[framework].versions
        patch.setattr(plugins, "version", lambda name: versions.get(name) or real(name))
        patch.setattr(
            platform, "python_version_tuple", lambda: versions.get("python", "3.11.0").split(".")
        )
        return made[framework]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield world


Edit = Callable[[World], object]


def text(name: str, old: str, new: str) -> Edit:
    def edit(world: World) -> None:
        path = world.root / name
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))

    return edit


def pipeline(old: str, new: str) -> Edit:
    return text("shop.yaml", old, new)


def version(name: str) -> Edit:
    return lambda world: world.versions.update({name: "999.9"})


def touch(world: World) -> None:
    for path in world.root.rglob("*"):
        if ".onnx-ops" not in path.parts:
            os.utime(path, (1, 1))


LIBRARY = "custom_ops: [{path: operators.so, digest: DIGEST, domains: [mine]}]\n"

EDITS: dict[str, tuple[Edit, set[str]]] = {
    # The following entries edit code.
    "the class": (text("shop/net.py", "= FACTOR", "= 3 * FACTOR"), TRAINED),
    "a constant that the class imports": (text("shop/constants.py", "2", "3"), TRAINED),
    "the package around the class": (
        text("shop/__init__.py", "import Net", "import Net as Net"),
        TRAINED,
    ),
    "the training function": (text("shop/training.py", "return", "pass; return"), {"train"}),
    "a file that code reads": (text("shop/table.json", "{}", "[]"), TRAINED),
    "an own metric": (text("judging/score.py", "1.0", "2.0"), MEASURED),
    "a helper of an own metric": (text("judging/parts.py", "/ 2", "/ 3"), MEASURED),
    # The following entries edit data.
    "training rows": (lambda world: world.save("train", 1.0), {"data/train", "train", "register"}),
    "test rows": (lambda world: world.save("test", 1.0), {"data/test"} | EXPORTED),
    "test labels": (lambda world: world.save("test", 0.0, 1.0), {"data/test"} | EXPORTED),
    "which array is the label": (
        pipeline(
            "test: {file: test.npz, inputs: {x: x}, label: y}",
            "test: {file: test.npz, inputs: {x: x}, label: y2}",
        ),
        {"data/test"} | EXPORTED,
    ),
    "the name of an input": (
        pipeline("test.npz, inputs: {x: x}", "test.npz, inputs: {z: x}"),
        {"data/test"} | EXPORTED,
    ),
    # The following entries edit options.
    "a parameter of training": (
        text("params.yaml", "rate: 0.5", "rate: 0.7"),
        {"train", "register"},
    ),
    "what code depends on": (pipeline("[shop/table.json]", "[]"), TRAINED),
    "the opset": (pipeline("opset: 18", "opset: 17"), EXPORTED),
    "the IR version": (pipeline("ir_version: 10", "ir_version: 9"), EXPORTED),
    "free axes": (pipeline("ir_version: 10", "ir_version: 10, dynamic: {x: {0: rows}}"), EXPORTED),
    "an option of the exporter": (
        pipeline("ir_version: 10", "ir_version: 10, options: {convert: true}"),
        EXPORTED,
    ),
    "what callers send": (
        pipeline("objective: latency", "objective: latency\ninputs: {x: {min: -9}}"),
        EXPORTED,
    ),
    "how long the source may answer": (
        pipeline("limit: 20}", "limit: 20}, source_time: 5 s"),
        EXPORTED,
    ),
    "what parity does with a group": (
        pipeline("{kind: parity}", "{kind: parity, groups: {beyond_range: ignore}}"),
        JUDGED,
    ),
    "how many rows validate": (pipeline("limit: 20", "limit: 10"), EXPORTED),
    "which rows validate": (pipeline("samples: {data: test", "samples: {data: train"), TRAINED),
    "per channel": (
        pipeline("method: dynamic}", "method: dynamic, per_channel: false}"),
        {"quantize/int8"} | of("int8", MEASURED),
    ),
    "an excluded node": (
        pipeline("method: fp16}", "method: fp16, exclude: [n]}"),
        {"quantize/half"} | of("half", MEASURED),
    ),
    "the benchmark's batch": (pipeline("[cpu, edge]}", "[cpu, edge], batch: 2}"), MEASURED),
    "threads of a target": (
        text("configs/targets/edge.yaml", "intra_op_threads: 1", "intra_op_threads: 2"),
        on("edge", MEASURED),
    ),
    "a gate": (pipeline("max: 1 MB", "max: 2 MB"), JUDGED),
    "the limit of a metric": (pipeline("max_drop: 1%", "max_drop: 2%"), JUDGED),
    "another metric": (
        pipeline("{kind: size", "{kind: metric, name: f1, min: 10%}\n  - {kind: size"),
        MEASURED,
    ),
    "throughput": (
        pipeline("{kind: size", "{kind: throughput, min: 1}\n  - {kind: size"),
        MEASURED,
    ),
    "a gate of a target": (
        text(
            "configs/targets/edge.yaml",
            "name: edge",
            "name: edge\ngates: [{kind: size, max: 3 MB}]",
        ),
        on("edge", JUDGED),
    ),
    "what is preferred": (pipeline("objective: latency", "objective: size"), {"register"}),
    "the registered model": (pipeline("model: shop", "model: shop2"), MEASURED),
    "the exporter's environment": (
        pipeline("ir_version: 10", "ir_version: 10, env: {requirements: [a==1]}"),
        TRAINED,
    ),
    # The following entries change versions.
    "Python": (version("python"), {"data/train", "data/test"} | TRAINED),
    "onnx-ops": (version("onnx-ops"), {"data/train", "data/test"} | TRAINED),
    "a package that training imports": (version("PyYAML"), {"train"}),
    "numpy": (version("numpy"), TRAINED),
    "onnxruntime": (version("onnxruntime"), EXPORTED - {"export"}),
    # After the following edits, no stage runs again.
    "another module": (text("other.py", "...", "pass"), set()),
    "a comment in another module": (text("other.py", "def", "# trains\ndef"), set()),
    "a module of the package that nothing imports": (
        text("shop/unused.py", "Net", "Net  # 2"),
        set(),
    ),
    "a new module of the package": (
        lambda world: (world.root / "shop" / "added.py").write_text("A = 1\n"),
        set(),
    ),
    "another pipeline's file": (text("configs/pipelines/other.yaml", "other", "another"), set()),
    "another pipeline's target": (
        text("configs/targets/far.yaml", "far", "far\ndescription: away"),
        set(),
    ),
    "times of files": (touch, set()),
    "the README": (text("README.md", "Shop", "Shops"), set()),
    "an unused parameter": (text("params.yaml", "other: 1", "other: 2"), set()),
    "comments and order of the pipeline file": (
        pipeline(
            "{file: test.npz, inputs: {x: x}, label: y}",
            "{label: y, file: test.npz, inputs: {x: x}}  # test",
        ),
        set(),
    ),
    "the description": (pipeline("Things.", "All things."), set()),
    "retries and time-outs": (
        pipeline("limit: 20}", "limit: 20}, retries: 2, timeout: 9 min"),
        set(),
    ),
    "a target's description and price": (
        text(
            "configs/targets/edge.yaml",
            "name: edge",
            "name: edge\ndescription: small\nprice_per_hour: 0.5",
        ),
        set(),
    ),
    "where it is deployed": (pipeline("steps: [10%, 100%]", "steps: [50%, 100%]"), set()),
    "a package that nothing here uses": (version("mlflow"), set()),
}
ISOLATED = ("paddle", "tensorflow", "tflite")
QUANTIZED = {"quantize/int8", "quantize/half"} | of("int8", MEASURED) | of("half", MEASURED)
OTHERWISE: dict[tuple[str, str], set[str]] = {
    # An ONNX file contains the whole computation, so its export depends on no class. The source
    # model runs in ONNX Runtime, so it depends on no other package.
    **{
        ("onnx", edit): {"train"}
        for edit, (_, again) in EDITS.items()
        if "class" in edit and again == TRAINED
    },
    ("onnx", "a file that code reads"): {"train"} | MEASURED,
    ("onnx", "what code depends on"): {"train"} | MEASURED,
    ("onnx", "numpy"): QUANTIZED,
    ("onnx", "onnxruntime"): EXPORTED,
    # Packages of this installation are not those of an isolated environment.
    **{(name, "numpy"): QUANTIZED for name in ISOLATED},
    **{(name, "a package that training imports"): set() for name in ISOLATED},
}


def each_exporter(default: str) -> list[object]:
    """Return all exporters; those other than the default run in the nightly tier."""
    return [
        pytest.param(name, marks=() if name == default else pytest.mark.nightly)
        for name in plugins.names("exporters")
    ]


def check_edit(world: World, change: Edit, expected: set[str]) -> None:
    try:
        change(world)
        assert world.run() == expected
    finally:
        world.versions.clear()
        world.write()
    assert world.run() == set()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("framework", each_exporter("sklearn"))
def test_run_after_edit_executes_only_dependent_stages(
    worlds: Callable[[str], World], framework: str, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few exporters have options, so each gets one here.
    monkeypatch.setattr(type(plugins.load("exporters", framework)), "options", ("convert",))
    change, expected = EDITS[edit]
    check_edit(worlds(framework), change, OTHERWISE.get((framework, edit), expected))


@pytest.mark.parametrize("framework", each_exporter("torch"))
def test_run_after_tool_update_executes_stages_that_use_it(
    worlds: Callable[[str], World], framework: str
) -> None:
    exporter, world = plugins.load("exporters", framework), worlds(framework)
    here = framework not in ISOLATED
    for tool in set(exporter.tools) - {"numpy"}:
        check_edit(
            world, version(tool), (TRAINED if here else QUANTIZED & used_by_quantizers(tool))
        )
    for tool in set(exporter.converters) - {"onnxruntime"}:
        check_edit(
            world, version(tool), (EXPORTED if here else QUANTIZED & used_by_quantizers(tool))
        )


def used_by_quantizers(tool: str) -> set[str]:
    return QUANTIZED if tool == "onnx" else set()


CLASS = ("the class", "a constant that the class imports", "the package around the class")


@pytest.mark.parametrize(
    "edit", [*CLASS, "the model", "a package that its file names", "another module", "PyTorch"]
)
def test_run_of_user_model_after_edit_executes_only_dependent_stages(
    worlds: Callable[[str], World], edit: str
) -> None:
    world = worlds(BROUGHT)
    edits: dict[str, tuple[Edit, set[str]]] = {
        **EDITS,
        "the model": (text("net.bin", "Base", "Case"), TRAINED),
        "a package that its file names": (version("PyYAML"), TRAINED),
        "PyTorch": (version("torch"), TRAINED),
    }
    change, expected = edits[edit]
    try:
        change(world)
        assert world.run() == expected
        assert world.run() == set()
    finally:
        world.versions.clear()
        world.write()
    # `write` has rewritten the model's file, so `train` can run again. The results of the later
    # stages are cached.
    assert world.run() <= {"train"}
