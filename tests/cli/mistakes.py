"""Mistakes that people make in a project.

Each one states what changes, which command finds it, and where. Apart from the mistake, the project
is correct. A mistake in a pipeline file replaces one text in it. Other mistakes change a file of
the project, or are the command itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from onnx_ops.testing.models import CLASSES, FEATURES, write_perceptron

SHOP, READY = "configs/pipelines/shop.yaml", "configs/pipelines/ready.yaml"
TRAINED = """\
schema: 1
pipeline: shop
data:
  train: {file: data/train.npz, inputs: {x: x}, label: y}
  test: {file: data/test.npz, inputs: {x: x}, label: y}
train:
  run: models.shop:train
  with: {epochs: 3}
export: {framework: sklearn, opset: 18}
validate:
  samples: {data: test, limit: 50}
quantize:
  - {name: int8, method: static, calibrate: {data: train}}
  - {name: small, method: dynamic}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: metric, name: accuracy, max_drop: 2%}
  - {kind: latency, p99: 5 ms}
  - {kind: size, max: 2 MB}
register: {model: shop}
deploy:
  - {endpoint: shop, target: cpu-1t, rollout: {steps: [10%, 100%], guardrails: [errors]}}
"""
BROUGHT = """\
pipeline: ready
data:
  test: {file: data/test.npz, inputs: {x: x}, label: y}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: metric, name: accuracy, min: 80%}
"""
CODE = """\
import numpy


def train(data, epochs, rate=0.1):
    return None
"""
ROWS = 60
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"

Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A change of a valid project, or a wrong command, and the error that it causes.

    Args:
        name: what a person did.
        path: reported key, as in `gates[1].max_drop`.
        old, new: text in the pipeline file, and its replacement.
        line: number of the reported line in the file; that of `new` if None.
        change: further change of the project's folder.
        file: the pipeline file.
        command: command that finds the mistake; `check FILE` if empty.
        code: exit code.
        environ: variables that are set.
        hidden: packages that are not installed.
    """

    name: str
    path: str = ""
    old: str = ""
    new: str = ""
    line: int | None = None
    change: Change = lambda _: None
    file: str = SHOP
    command: tuple[str, ...] = ()
    code: int = 2
    environ: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()


def write_project(root: Path) -> None:
    """Write a project whose two pipelines have no problem."""
    for folder in ("configs/pipelines", "configs/targets", "models", "data"):
        (root / folder).mkdir(parents=True)
    (root / "onnx-ops.toml").touch()
    (root / SHOP).write_text(TRAINED)
    (root / READY).write_text(BROUGHT)
    (root / "models/shop.py").write_text(CODE)
    write_rows(root / "data/train.npz")
    write_rows(root / "data/test.npz")
    write_table(root / "data/rows.csv")
    write_perceptron(root / "model.onnx")


def write_rows(path: Path, **changed: object) -> None:
    rows = {
        "x": np.linspace(0, 1, ROWS * FEATURES, dtype=np.float32).reshape(ROWS, FEATURES),
        "y": np.arange(ROWS) % CLASSES,
    }
    np.savez(path, **{**rows, **changed})  # type: ignore[arg-type]


def write_table(path: Path, text: str = "age,income,city,y\n" + "41,1.5,Oslo,1\n" * ROWS) -> None:
    path.write_text(text)


def rows(**changed: object) -> Change:
    return lambda root: write_rows(root / "data/test.npz", **changed)


def content(name: str, data: bytes) -> Change:
    return lambda root: (root / name).write_bytes(data)


def write_logarithm(root: Path) -> None:
    """Let the model answer with the logarithm of its scores.

    Some scores are negative.
    """
    model = onnx.load(root / "model.onnx")
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(onnx.helper.make_node("Log", ["raw"], ["scores"], name="log"))
    onnx.save(model, root / "model.onnx")


def write_regressor(root: Path) -> None:
    """Let the model answer with one number per row, which is not a probability."""
    model = onnx.load(root / "model.onnx")
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(
        onnx.helper.make_node("MatMul", ["raw", "sums"], ["scores"], name="sum")
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.full((CLASSES, 1), 1e3, np.float32), "sums")
    )
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(model, root / "model.onnx")


def written(name: str, text: str) -> Change:
    return lambda root: (root / name).write_text(text)


def folder_for(name: str) -> Change:
    def change(root: Path) -> None:
        (root / name).unlink()
        (root / name).mkdir()

    return change


def coded(old: str, new: str) -> Change:
    """Return a change that replaces one text in the module of the training function."""
    return lambda root: (root / "models/shop.py").write_text(CODE.replace(old, new))


def unopened(root: Path) -> None:
    """Write an object array, which only a pickle can contain."""
    np.savez(root / "data/test.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))


_FLOATS = np.linspace(0, 1, ROWS, dtype=np.float32)
_TEST = "test: {file: data/test.npz, inputs: {x: x}, label: y}"
_TABLE = "test: {file: data/rows.csv, inputs: {x: '*'}, columns: [age, income], label: y}"

YAML = (
    Mistake("a misspelt key", "export", "opset: 18", "opsett: 18"),
    Mistake(
        "a key of another section",
        "register",
        "register: {model: shop}",
        "register: {model: shop, opset: 18}",
    ),
    Mistake("a word for a number", "export.opset", "opset: 18", "opset: ten"),
    Mistake("a number in quotes", "export.opset", "opset: 18", "opset: '18'"),
    Mistake("a text for a list", "benchmark.targets", "targets: [cpu-1t]", "targets: cpu-1t"),
    Mistake(
        "yes for true",
        "quantize[1].per_channel",
        "method: dynamic",
        "method: dynamic, per_channel: yes",
    ),
    Mistake(
        "m for minutes",
        "train.timeout",
        "with: {epochs: 3}",
        "with: {epochs: 3}\n  timeout: 20m",
        9,
    ),
    Mistake("a duration without a unit", "gates[1].p99", "p99: 5 ms", "p99: 5"),
    Mistake(
        "a share without a percent sign", "gates[0].max_drop", "max_drop: 2%", "max_drop: 0.02"
    ),
    Mistake("a size without a unit", "gates[2].max", "max: 2 MB", "max: 2"),
    Mistake("a section that is left out", "", "benchmark: {targets: [cpu-1t]}\n", "", 1),
    Mistake("a key that comes twice", "", "pipeline: shop", "pipeline: shop\npipeline: again", 3),
    Mistake("a tab", "", "  run: models", "\trun: models"),
    Mistake("a bracket that is not closed", "", "{targets: [cpu-1t]}", "{targets: [cpu-1t}"),
    Mistake("a colon without a space", "", "schema: 1", "schema:1", 2),
    Mistake("an empty file", line=1, change=written(SHOP, "")),
    Mistake("a list for the file", line=1, change=written(SHOP, "- pipeline: shop\n")),
    Mistake(
        "a merge key",
        "quantize[0]",
        "quantize:\n  - {name: int8,",
        "quantize:\n  - {<<: 1, name: int8,",
        13,
    ),
    Mistake("a newer schema", "schema", "schema: 1", "schema: 2"),
    Mistake("a name with a capital and a space", "pipeline", "pipeline: shop", "pipeline: My shop"),
    Mistake(
        "a variable that is not set",
        "register.model",
        "register: {model: shop}",
        "register: {model: '${env:MODEL}'}",
    ),
    Mistake(
        "a parameter that params.yaml lacks",
        "train.with.epochs",
        "epochs: 3",
        "epochs: '${params:train.epochs}'",
        change=written("params.yaml", "train: {epoch: 3}\n"),
    ),
)
NAMES = (
    Mistake(
        "an unknown exporter", "export.framework", "framework: sklearn", "framework: scikit-learn"
    ),
    Mistake(
        "an unknown target", "benchmark.targets[1]", "targets: [cpu-1t]", "targets: [cpu-1t, cpu-4]"
    ),
    Mistake("an unknown method", "quantize[1].method", "method: dynamic", "method: dinamic"),
    Mistake(
        "an unknown provider",
        "deploy[0].provider",
        "target: cpu-1t, rollout",
        "target: cpu-1t, provider: aws, rollout",
    ),
    Mistake("an unknown metric", "gates[0].name", "name: accuracy", "name: acuracy"),
    Mistake(
        "an unknown guardrail",
        "deploy[0].rollout.guardrails[0]",
        "guardrails: [errors]",
        "guardrails: [error_rate]",
    ),
    Mistake("an unknown kind of gate", "gates[2].kind", "kind: size", "kind: sizes"),
    Mistake("an unknown source of data", "data.test.source", _TEST, "test: {source: s3, label: y}"),
    Mistake(
        "an unknown data set",
        "validate.samples.data",
        "samples: {data: test,",
        "samples: {data: tset,",
    ),
    Mistake(
        "two targets of one name", "benchmark.targets[1]", "[cpu-1t]}\n", "[cpu-1t, cpu-1t]}\n", 15
    ),
    Mistake("two variants of one name", "quantize[1].name", "name: small", "name: int8", 14),
    Mistake(
        "a variant with the name of the export", "quantize[1].name", "name: small", "name: fp32"
    ),
    Mistake(
        "an endpoint of another file",
        "deploy[0].endpoint",
        line=22,
        change=written("configs/pipelines/other.yaml", TRAINED),
    ),
    Mistake(
        "a model's name with a space",
        "register.model",
        "register: {model: shop}",
        "register: {model: My shop}",
    ),
    Mistake(
        "a model's name with a slash",
        "register.model",
        "register: {model: shop}",
        "register: {model: shop/v1}",
    ),
    Mistake("a deployment without a registry", "deploy", "register: {model: shop}\n", "", 21),
    Mistake(
        "an endpoint's target that is not measured",
        "deploy[0].target",
        "endpoint: shop, target: cpu-1t",
        "endpoint: shop, target: cpu-all",
    ),
    Mistake(
        "an unknown option of a provider",
        "deploy[0].options",
        "rollout: {steps",
        "options: {prt: 80}, rollout: {steps",
    ),
    Mistake(
        "a port that is none",
        "deploy[0].options.port",
        "rollout: {steps",
        "options: {port: 80800}, rollout: {steps",
    ),
)
RULES = (
    Mistake(
        "steps that do not rise",
        "deploy[0].rollout.steps",
        "steps: [10%, 100%]",
        "steps: [50%, 10%, 100%]",
    ),
    Mistake(
        "static quantization without calibration",
        "quantize[0]",
        ", calibrate: {data: train}",
        "",
        13,
    ),
    Mistake(
        "calibration with the scored rows",
        "quantize[0].calibrate.data",
        "calibrate: {data: train}",
        "calibrate: {data: test}",
    ),
    Mistake("a metric gate without a limit", "gates[0]", ", max_drop: 2%", "", 17),
    Mistake("a limit in the wrong direction", "gates[0]", "max_drop: 2%", "max_increase: 2%"),
    Mistake("a key of another metric", "gates[0]", "max_drop: 2%", "max_drop: 2%, bins: 9"),
    Mistake(
        "values per row of a metric of the table",
        "gates[0]",
        "max_drop: 2%",
        "max_drop: 2%, per: row",
    ),
    Mistake(
        "a metric gate without labels",
        "gates[0]",
        "inputs: {x: x}, label: y}\ntrain:",
        "inputs: {x: x}}\ntrain:",
        17,
    ),
    Mistake("train and model at once", "", "export:", "model: model.onnx\nexport:", 9),
    Mistake("neither train nor model", "", "model: model.onnx\n", "", 1, file=READY),
    Mistake(
        "an opset above the target's",
        "export.opset",
        "[cpu-1t]}",
        "[cpu-1t, old]}",
        9,
        change=written("configs/targets/old.yaml", "name: old\nmax_opset: 15\n"),
    ),
)
OPTIONS = (
    Mistake(
        "an option that the exporter lacks",
        "export.options",
        "opset: 18",
        "opset: 18, options: {zipmap: false}",
    ),
    Mistake(
        "a free axis of an input that is not there",
        "export.dynamic",
        "opset: 18",
        "opset: 18, dynamic: {X: {0: batch}}",
    ),
    Mistake(
        "an option that the optimizer lacks",
        "quantize[1].options",
        "method: dynamic",
        "method: dynamic, options: {bits: 4}",
    ),
    Mistake(
        "an option of another kind",
        "quantize[1].options.reduce_range",
        "method: dynamic",
        "method: dynamic, options: {reduce_range: maybe}",
    ),
)
DATA = (
    Mistake("a data file that is missing", "data.test.file", "data/test.npz", "data/tset.npz"),
    Mistake(
        "a folder for a data file", "data.test.file", line=5, change=folder_for("data/test.npz")
    ),
    Mistake("an empty data file", "data.test.file", line=5, change=content("data/test.npz", b"")),
    Mistake(
        "a pointer of Git LFS for data",
        "data.test.file",
        line=5,
        change=content("data/test.npz", POINTER),
    ),
    Mistake("data that only a pickle can hold", "data.test.file", line=5, change=unopened),
    Mistake(
        "a data file of another kind",
        "data.test.file",
        line=5,
        change=content("data/test.npz", b"x,y\n1,2\n"),
    ),
    Mistake("data outside of the project", "data.test.file", "data/test.npz", "../test.npz"),
    Mistake(
        "an array that is missing",
        "data.test.inputs.x",
        "test.npz, inputs: {x: x}",
        "test.npz, inputs: {x: X}",
    ),
    Mistake(
        "a label that is missing",
        "data.test.label",
        "label: y}\ntrain:",
        "label: target}\ntrain:",
        5,
    ),
    Mistake("fewer labels than rows", "data.test", line=5, change=rows(y=np.arange(7))),
    Mistake("labels that are fractions", "data.test.label", line=5, change=rows(y=_FLOATS)),
    Mistake(
        "labels that are missing",
        "data.test.label",
        line=5,
        change=rows(y=np.where(_FLOATS > 0.5, np.nan, 1)),
    ),
    Mistake("labels as a matrix", "data.test.label", line=5, change=rows(y=np.eye(ROWS, 3))),
    Mistake(
        "texts as labels of numbers",
        "data.test.label",
        "name: accuracy, max_drop",
        "name: rmse, max_increase",
        5,
        change=rows(y=np.array(["a", "b"] * (ROWS // 2))),
    ),
    Mistake(
        "a positive label that is not named", "data.test.label", "name: accuracy", "name: auc", 5
    ),
    Mistake(
        "a table without the label's column",
        "data.test.label",
        _TEST,
        _TABLE.replace("label: y", "label: Y"),
    ),
    Mistake(
        "a table without a chosen column",
        "data.test.columns[1]",
        _TEST,
        _TABLE.replace("income", "incom"),
    ),
    Mistake(
        "a column of texts in a matrix",
        "data.test.inputs.x",
        _TEST,
        _TABLE.replace("income", "city"),
    ),
    Mistake(
        "a table with a short line",
        "data.test.file",
        _TEST,
        _TABLE,
        change=lambda root: write_table(root / "data/rows.csv", "age,income,city,y\n41,1.5\n"),
    ),
    Mistake(
        "a table without rows",
        "data.test.file",
        _TEST,
        _TABLE,
        change=lambda root: write_table(root / "data/rows.csv", "age,income,city,y\n"),
    ),
    Mistake(
        "an array that scikit-learn's data lacks",
        "data.test.label",
        _TEST,
        "test: {sklearn: iris, split: test, label: species}",
    ),
)
CODES = (
    Mistake("an unknown parameter of training", "train.with", "epochs: 3", "epochs: 3, rat: 0.2"),
    Mistake("a missing parameter of training", "train.run", "with: {epochs: 3}", "with: {}", 7),
    Mistake("a training function that is missing", "train.run", "shop:train", "shop:trian"),
    Mistake("a module that is missing", "train.run", "models.shop:train", "models.shp:train"),
    Mistake("a dot before the function", "train.run", "models.shop:train", "models.shop.train"),
    Mistake(
        "a module that is not Python", "train.run", line=7, change=coded("return None", "return (")
    ),
    Mistake(
        "a module that imports what is nowhere",
        "train.run",
        line=7,
        change=coded("import numpy", "import numpie"),
    ),
    Mistake(
        "a module that imports a module that is missing",
        "train.run",
        line=7,
        change=coded("import numpy", "from models.net import Net"),
    ),
    Mistake(
        "a dependency that is missing",
        "train.depends[0]",
        "with: {epochs: 3}",
        "with: {epochs: 3}\n  depends: [words.txt]",
        9,
    ),
    Mistake(
        "an own metric that is missing",
        "gates[0].use",
        "{kind: metric, name: accuracy, max_drop: 2%}",
        "{kind: metric, use: 'models.shop:f2', higher_is_better: true, max_drop: 2%}",
    ),
    Mistake(
        "a decoder that is missing",
        "gates[0].decode",
        "max_drop: 2%",
        "max_drop: 2%, decode: 'models.shop:decode'",
    ),
)
MODELS = (
    Mistake("a model that is missing", "model", "model.onnx", "modle.onnx", file=READY),
    Mistake("an empty model", "model", line=4, change=content("model.onnx", b""), file=READY),
    Mistake(
        "a model that is a pickle",
        "model",
        line=4,
        change=content("model.onnx", b"\x80\x04K\x01."),
        file=READY,
    ),
    Mistake(
        "a pointer of Git LFS for a model",
        "model",
        line=4,
        change=content("model.onnx", POINTER),
        file=READY,
    ),
    Mistake(
        "a model of a newer opset",
        "model",
        line=4,
        change=lambda root: write_perceptron(root / "model.onnx", opset=21),
        file=READY,
    ),
    Mistake(
        "rows of another width",
        "data.test.inputs.x",
        line=3,
        change=rows(x=np.zeros((ROWS, 5), np.float32)),
        file=READY,
    ),
    Mistake(
        "rows of another type",
        "data.test.inputs.x",
        line=3,
        change=rows(x=np.zeros((ROWS, FEATURES))),
        file=READY,
    ),
    Mistake(
        "an input that the model does not take",
        "data.test.inputs.z",
        "inputs: {x: x}",
        "inputs: {x: x, z: x}",
        file=READY,
    ),
    Mistake(
        "an input that the data lack",
        "data.test.inputs",
        "inputs: {x: x}",
        "inputs: {input: x}",
        file=READY,
    ),
    Mistake(
        "labels out of range",
        "data.test.label",
        line=3,
        change=rows(y=np.arange(ROWS) % 5),
        file=READY,
    ),
    Mistake(
        "labels of another kind than the model's",
        "data.test.label",
        line=3,
        change=rows(y=np.array(["a", "b"] * (ROWS // 2))),
        file=READY,
    ),
    Mistake(
        "a metric of classes for a model of numbers",
        "data.test.label",
        line=3,
        change=write_regressor,
        file=READY,
    ),
    Mistake(
        "numbers as labels of a metric of texts",
        "data.test.label",
        "name: accuracy, min: 80%",
        "name: bleu, min: 30%",
        3,
        file=READY,
    ),
    Mistake(
        "a metric of texts for a model of scores without a decoder",
        "data.test.label",
        "name: accuracy, min: 80%",
        "name: wer, max: 0.09",
        3,
        change=rows(y=np.array(["two words"] * ROWS)),
        file=READY,
    ),
    Mistake(
        "texts whose labels are all empty",
        "data.test.label",
        "name: accuracy, min: 80%",
        "name: wer, max: 0.09",
        3,
        change=rows(y=np.array([""] * ROWS)),
        file=READY,
    ),
    Mistake(
        "a metric of numbers for a model of classes",
        "data.test.label",
        "name: accuracy, min: 80%",
        "name: rmse, max: 2",
        3,
        file=READY,
    ),
)
_SAGEMAKER = (
    "provider: sagemaker, options: {role: 'arn:aws:iam::123456789012:role/r', bucket: "
    "models-1, instance_type: ml.m5.large, "
    "image: '123456789012.dkr.ecr.eu-west-1.amazonaws.com/i:1'}, rollout"
)
_AZURE = (
    "provider: azureml, options: {subscription: 00000000-0000-0000-0000-000000000001, "
    "resource_group: g, workspace: w, instance_type: Standard_DS3_v2, "
    "image: 'registry.example/i:1', control: abfs://c@a.dfs.core.windows.net/t, "
    "reports: abfs://r@a.dfs.core.windows.net/t}, rollout"
)
CLOUDS = (
    Mistake(
        "counts of CloudWatch for versions that a table routes to",
        "deploy[0].metrics.source",
        "rollout",
        f"metrics: {{source: cloudwatch}}, {_SAGEMAKER}",
    ),
    Mistake(
        "counts of Azure Monitor for versions that a table routes to",
        "deploy[0].metrics.source",
        "rollout",
        f"metrics: {{source: azuremonitor}}, {_AZURE}",
    ),
)
MACHINE = (
    Mistake(
        "no credentials for AWS",
        "deploy[0].provider",
        "rollout",
        _SAGEMAKER,
        code=4,
        environ={"AWS_DEFAULT_REGION": "eu-west-1"},
    ),
    Mistake("no region of AWS", "deploy[0].provider", "rollout", _SAGEMAKER, code=4),
    Mistake("no credentials for Azure", "deploy[0].provider", "rollout", _AZURE, code=4),
    Mistake(
        "no token for servers",
        "deploy[0].provider",
        "rollout",
        "metrics: {source: servers, options: {urls: ['http://127.0.0.1:1']}}, rollout",
        code=4,
    ),
    Mistake(
        "no key to sign with", line=1, change=written("onnx-ops.toml", "signing = 'required'\n")
    ),
    Mistake(
        "a package that is not installed", "export.framework", line=9, code=4, hidden=("skl2onnx",)
    ),
    Mistake(
        "a module that imports a package that is not installed",
        "train.run",
        line=7,
        change=coded("import numpy", "import torch"),
        code=4,
        hidden=("torch",),
    ),
    Mistake(
        "a metric whose package is not installed",
        "gates[0].name",
        "name: accuracy, max_drop: 2%",
        "name: wer, max_increase: 2%",
        change=rows(y=np.array(["two words"] * ROWS)),
        code=4,
        hidden=("jiwer",),
    ),
)
FILES = (*YAML, *NAMES, *RULES, *OPTIONS, *DATA, *CODES, *MODELS, *CLOUDS, *MACHINE)


def command(name: str, words: str, change: Change = lambda _: None, code: int = 2) -> Mistake:
    return Mistake(name, command=tuple(words.split()), change=change, code=code)


COMMANDS = (
    command("no file", "run"),
    command("a misspelt option", "run configs/pipelines/shop.yaml --untl gate"),
    command("an unknown stage", "run configs/pipelines/shop.yaml --until gat"),
    command("a word for a number of jobs", "run configs/pipelines/shop.yaml --jobs all"),
    command("a misspelt pipeline file", "plan configs/pipelines/shp.yaml"),
    command("a folder for a pipeline file", "check configs/pipelines"),
    command("a model for a pipeline file", "run model.onnx"),
    command("an override without a value", "run configs/pipelines/shop.yaml --set export.opset"),
    command(
        "an override of an unknown key", "run configs/pipelines/shop.yaml --set export.opsett=17"
    ),
    command(
        "an override of an entry that is not there",
        "run configs/pipelines/shop.yaml --set gates[7].max=2",
    ),
    command(
        "a misspelt key in onnx-ops.toml",
        "check configs/pipelines/shop.yaml",
        written("onnx-ops.toml", "stor = 'x'\n"),
    ),
    command(
        "onnx-ops.toml that is not TOML",
        "check configs/pipelines/shop.yaml",
        written("onnx-ops.toml", "store = x\n"),
    ),
    command("data for a model", "inspect data/test.npz"),
    command("one model for two", "judge model.onnx"),
    command("a limit without a percent sign", "judge model.onnx model.onnx --max-regression 5"),
    command("an unknown verb of rollouts", "rollout start shop"),
    command("m for minutes in an option", "history shop --since 20m"),
    command("a project in a folder that is not empty", "init ."),
    command("an unknown provider of doctor", "doctor --provider aws"),
    command("a deletion that is not confirmed", "delete shop"),
)
