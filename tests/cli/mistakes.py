"""Mistakes that people make in a project: what they change, which command finds it, and where.

Each stands beside a project that is right. A mistake in a pipeline file replaces one text in it; others change a file
of the project, or are the command itself.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake.

    Args:
        name: what a person did.
        old, new: the text that is replaced in the pipeline file, and what by.
        change: what else is done to the project's folder.
        file: the pipeline file.
        command: that finds it; `check FILE` if empty.
        code: exit code.
        path: key that is blamed, as in `gates[1].max_drop`.
        line: number of the blamed line in the file; that of `new` if None.
        environ: variables that are set.
        hidden: packages that are not installed.
    """

    name: str
    old: str = ""
    new: str = ""
    change: Change = lambda _: None
    file: str = SHOP
    command: tuple[str, ...] = ()
    code: int = 2
    path: str = ""
    line: int | None = None
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
    """Let the model answer with the logarithm of its scores, some of which are negative."""
    model = onnx.load(root / "model.onnx")
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(onnx.helper.make_node("Log", ["raw"], ["scores"], name="log"))
    onnx.save(model, root / "model.onnx")


def write_regressor(root: Path) -> None:
    """Let the model answer with one number a row, which is no probability."""
    model = onnx.load(root / "model.onnx")
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(onnx.helper.make_node("MatMul", ["raw", "sums"], ["scores"], name="sum"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((CLASSES, 1), 1e3, np.float32), "sums"))
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
    """One replacement in the module of the training function."""
    return lambda root: (root / "models/shop.py").write_text(CODE.replace(old, new))


def unopened(root: Path) -> None:
    """An object array, which only a pickle can hold."""
    np.savez(root / "data/test.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))


_FLOATS = np.linspace(0, 1, ROWS, dtype=np.float32)
_TEST = "test: {file: data/test.npz, inputs: {x: x}, label: y}"
_TABLE = "test: {file: data/rows.csv, inputs: {x: '*'}, columns: [age, income], label: y}"

YAML = (
    Mistake(name="a misspelt key", old="opset: 18", new="opsett: 18", path="export"),
    Mistake(
        name="a key of another section",
        old="register: {model: shop}",
        new="register: {model: shop, opset: 18}",
        path="register",
    ),
    Mistake(name="a word for a number", old="opset: 18", new="opset: ten", path="export.opset"),
    Mistake(name="a number in quotes", old="opset: 18", new="opset: '18'", path="export.opset"),
    Mistake(name="a text for a list", old="targets: [cpu-1t]", new="targets: cpu-1t", path="benchmark.targets"),
    Mistake(
        name="yes for true",
        old="method: dynamic",
        new="method: dynamic, per_channel: yes",
        path="quantize[1].per_channel",
    ),
    Mistake(
        name="m for minutes",
        old="with: {epochs: 3}",
        new="with: {epochs: 3}\n  timeout: 20m",
        path="train.timeout",
        line=9,
    ),
    Mistake(name="a duration without a unit", old="p99: 5 ms", new="p99: 5", path="gates[1].p99"),
    Mistake(name="a share without a percent sign", old="max_drop: 2%", new="max_drop: 0.02", path="gates[0].max_drop"),
    Mistake(name="a size without a unit", old="max: 2 MB", new="max: 2", path="gates[2].max"),
    Mistake(name="a section that is left out", old="benchmark: {targets: [cpu-1t]}\n", new="", path="", line=1),
    Mistake(
        name="a key that comes twice", old="pipeline: shop", new="pipeline: shop\npipeline: again", path="", line=3
    ),
    Mistake(name="a tab", old="  run: models", new="\trun: models", path=""),
    Mistake(name="a bracket that is not closed", old="{targets: [cpu-1t]}", new="{targets: [cpu-1t}", path=""),
    Mistake(name="a colon without a space", old="schema: 1", new="schema:1", path="", line=2),
    Mistake(name="an empty file", change=written(SHOP, ""), path="", line=1),
    Mistake(name="a list for the file", change=written(SHOP, "- pipeline: shop\n"), path="", line=1),
    Mistake(
        name="a merge key",
        old="quantize:\n  - {name: int8,",
        new="quantize:\n  - {<<: 1, name: int8,",
        path="quantize[0]",
        line=13,
    ),
    Mistake(name="a newer schema", old="schema: 1", new="schema: 2", path="schema"),
    Mistake(name="a name with a capital and a space", old="pipeline: shop", new="pipeline: My shop", path="pipeline"),
    Mistake(
        name="a variable that is not set",
        old="register: {model: shop}",
        new="register: {model: '${env:MODEL}'}",
        path="register.model",
    ),
    Mistake(
        name="a parameter that params.yaml lacks",
        old="epochs: 3",
        new="epochs: '${params:train.epochs}'",
        path="train.with.epochs",
        change=written("params.yaml", "train: {epoch: 3}\n"),
    ),
)
NAMES = (
    Mistake(
        name="an unknown exporter", old="framework: sklearn", new="framework: scikit-learn", path="export.framework"
    ),
    Mistake(
        name="an unknown target", old="targets: [cpu-1t]", new="targets: [cpu-1t, cpu-4]", path="benchmark.targets[1]"
    ),
    Mistake(name="an unknown method", old="method: dynamic", new="method: dinamic", path="quantize[1].method"),
    Mistake(
        name="an unknown provider",
        old="target: cpu-1t, rollout",
        new="target: cpu-1t, provider: aws, rollout",
        path="deploy[0].provider",
    ),
    Mistake(name="an unknown metric", old="name: accuracy", new="name: acuracy", path="gates[0].name"),
    Mistake(
        name="an unknown guardrail",
        old="guardrails: [errors]",
        new="guardrails: [error_rate]",
        path="deploy[0].rollout.guardrails[0]",
    ),
    Mistake(name="an unknown kind of gate", old="kind: size", new="kind: sizes", path="gates[2].kind"),
    Mistake(name="an unknown source of data", old=_TEST, new="test: {use: s3, label: y}", path="data.test.use"),
    Mistake(
        name="an unknown data set",
        old="samples: {data: test,",
        new="samples: {data: tset,",
        path="validate.samples.data",
    ),
    Mistake(
        name="two targets of one name",
        old="[cpu-1t]}\n",
        new="[cpu-1t, cpu-1t]}\n",
        path="benchmark.targets[1]",
        line=15,
    ),
    Mistake(name="two variants of one name", old="name: small", new="name: int8", path="quantize[1].name", line=14),
    Mistake(name="a variant with the name of the export", old="name: small", new="name: fp32", path="quantize[1].name"),
    Mistake(
        name="an endpoint of another file",
        path="deploy[0].endpoint",
        line=22,
        change=written("configs/pipelines/other.yaml", TRAINED),
    ),
    Mistake(
        name="a model's name with a space",
        old="register: {model: shop}",
        new="register: {model: My shop}",
        path="register.model",
    ),
    Mistake(
        name="a model's name with a slash",
        old="register: {model: shop}",
        new="register: {model: shop/v1}",
        path="register.model",
    ),
    Mistake(name="a deployment without a registry", old="register: {model: shop}\n", new="", path="deploy", line=21),
    Mistake(
        name="an endpoint's target that is not measured",
        old="endpoint: shop, target: cpu-1t",
        new="endpoint: shop, target: cpu-all",
        path="deploy[0].target",
    ),
    Mistake(
        name="an unknown setting of a provider",
        old="rollout: {steps",
        new="settings: {prt: 80}, rollout: {steps",
        path="deploy[0].settings",
    ),
    Mistake(
        name="a port that is none",
        old="rollout: {steps",
        new="settings: {port: 80800}, rollout: {steps",
        path="deploy[0].settings.port",
    ),
)
RULES = (
    Mistake(
        name="steps that do not rise",
        old="steps: [10%, 100%]",
        new="steps: [50%, 10%, 100%]",
        path="deploy[0].rollout.steps",
    ),
    Mistake(
        name="static quantization without calibration",
        old=", calibrate: {data: train}",
        new="",
        path="quantize[0]",
        line=13,
    ),
    Mistake(
        name="calibration with the scored rows",
        old="calibrate: {data: train}",
        new="calibrate: {data: test}",
        path="quantize[0].calibrate.data",
    ),
    Mistake(name="a metric gate without a limit", old=", max_drop: 2%", new="", path="gates[0]", line=17),
    Mistake(name="a limit in the wrong direction", old="max_drop: 2%", new="max_increase: 2%", path="gates[0]"),
    Mistake(
        name="a metric gate without labels",
        old="inputs: {x: x}, label: y}\ntrain:",
        new="inputs: {x: x}}\ntrain:",
        path="gates[0]",
        line=17,
    ),
    Mistake(name="train and model at once", old="export:", new="model: model.onnx\nexport:", path="", line=9),
    Mistake(name="neither train nor model", old="model: model.onnx\n", new="", file=READY, path="", line=1),
    Mistake(
        name="an opset above the target's",
        old="[cpu-1t]}",
        new="[cpu-1t, old]}",
        path="export.opset",
        line=9,
        change=written("configs/targets/old.yaml", "name: old\nmax_opset: 15\n"),
    ),
)
OPTIONS = (
    Mistake(
        name="an option that the exporter lacks",
        old="opset: 18",
        new="opset: 18, options: {zipmap: false}",
        path="export.options",
    ),
    Mistake(
        name="a free axis of an input that is not there",
        old="opset: 18",
        new="opset: 18, dynamic: {X: {0: batch}}",
        path="export.dynamic",
    ),
    Mistake(
        name="an option that the optimizer lacks",
        old="method: dynamic",
        new="method: dynamic, options: {bits: 4}",
        path="quantize[1].options",
    ),
    Mistake(
        name="an option of another kind",
        old="method: dynamic",
        new="method: dynamic, options: {reduce_range: maybe}",
        path="quantize[1].options.reduce_range",
    ),
)
DATA = (
    Mistake(name="a data file that is missing", old="data/test.npz", new="data/tset.npz", path="data.test.file"),
    Mistake(name="a folder for a data file", path="data.test.file", line=5, change=folder_for("data/test.npz")),
    Mistake(name="an empty data file", path="data.test.file", line=5, change=content("data/test.npz", b"")),
    Mistake(
        name="a pointer of Git LFS for data", path="data.test.file", line=5, change=content("data/test.npz", POINTER)
    ),
    Mistake(name="data that only a pickle can hold", path="data.test.file", line=5, change=unopened),
    Mistake(
        name="a data file of another kind",
        path="data.test.file",
        line=5,
        change=content("data/test.npz", b"x,y\n1,2\n"),
    ),
    Mistake(name="data outside of the project", old="data/test.npz", new="../test.npz", path="data.test.file"),
    Mistake(
        name="an array that is missing",
        old="test.npz, inputs: {x: x}",
        new="test.npz, inputs: {x: X}",
        path="data.test.inputs.x",
    ),
    Mistake(
        name="a label that is missing",
        old="label: y}\ntrain:",
        new="label: target}\ntrain:",
        path="data.test.label",
        line=5,
    ),
    Mistake(name="fewer labels than rows", path="data.test.file", line=5, change=rows(y=np.arange(7))),
    Mistake(name="labels that are fractions", path="data.test.label", line=5, change=rows(y=_FLOATS)),
    Mistake(
        name="labels that are missing",
        path="data.test.label",
        line=5,
        change=rows(y=np.where(_FLOATS > 0.5, np.nan, 1)),
    ),
    Mistake(name="labels as a matrix", path="data.test.label", line=5, change=rows(y=np.eye(ROWS, 3))),
    Mistake(
        name="texts as labels of numbers",
        old="name: accuracy, max_drop",
        new="name: rmse, max_increase",
        path="data.test.label",
        line=5,
        change=rows(y=np.array(["a", "b"] * (ROWS // 2))),
    ),
    Mistake(
        name="a positive label that is not named", old="name: accuracy", new="name: auc", path="data.test.label", line=5
    ),
    Mistake(
        name="a table without the label's column",
        old=_TEST,
        new=_TABLE.replace("label: y", "label: Y"),
        path="data.test.label",
    ),
    Mistake(
        name="a table without a chosen column",
        old=_TEST,
        new=_TABLE.replace("income", "incom"),
        path="data.test.columns[1]",
    ),
    Mistake(
        name="a column of texts in a matrix", old=_TEST, new=_TABLE.replace("income", "city"), path="data.test.inputs.x"
    ),
    Mistake(
        name="a table with a short line",
        old=_TEST,
        new=_TABLE,
        path="data.test.file",
        change=lambda root: write_table(root / "data/rows.csv", "age,income,city,y\n41,1.5\n"),
    ),
    Mistake(
        name="a table without rows",
        old=_TEST,
        new=_TABLE,
        path="data.test.file",
        change=lambda root: write_table(root / "data/rows.csv", "age,income,city,y\n"),
    ),
    Mistake(
        name="an array that scikit-learn's data lacks",
        old=_TEST,
        new="test: {sklearn: iris, split: test, label: species}",
        path="data.test.label",
    ),
)
CODES = (
    Mistake(name="an unknown parameter of training", old="epochs: 3", new="epochs: 3, rat: 0.2", path="train.with"),
    Mistake(name="a missing parameter of training", old="with: {epochs: 3}", new="with: {}", path="train.run", line=7),
    Mistake(name="a training function that is missing", old="shop:train", new="shop:trian", path="train.run"),
    Mistake(name="a module that is missing", old="models.shop:train", new="models.shp:train", path="train.run"),
    Mistake(name="a dot before the function", old="models.shop:train", new="models.shop.train", path="train.run"),
    Mistake(name="a module that is not Python", path="train.run", line=7, change=coded("return None", "return (")),
    Mistake(
        name="a module that imports what is nowhere",
        path="train.run",
        line=7,
        change=coded("import numpy", "import numpie"),
    ),
    Mistake(
        name="a module that imports a module that is missing",
        path="train.run",
        line=7,
        change=coded("import numpy", "from models.net import Net"),
    ),
    Mistake(
        name="training without data", path="train.run", line=7, change=coded("data, epochs, rate=0.1", "*, epochs")
    ),
    Mistake(
        name="a dependency that is missing",
        old="with: {epochs: 3}",
        new="with: {epochs: 3}\n  depends: [words.txt]",
        path="train.depends[0]",
        line=9,
    ),
    Mistake(
        name="an own metric that is missing",
        old="{kind: metric, name: accuracy, max_drop: 2%}",
        new="{kind: metric, use: 'models.shop:f2', higher_is_better: true, max_drop: 2%}",
        path="gates[0].use",
    ),
)
MODELS = (
    Mistake(name="a model that is missing", file=READY, old="model.onnx", new="modle.onnx", path="model"),
    Mistake(name="an empty model", file=READY, path="model", line=4, change=content("model.onnx", b"")),
    Mistake(
        name="a model that is a pickle",
        file=READY,
        path="model",
        line=4,
        change=content("model.onnx", b"\x80\x04K\x01."),
    ),
    Mistake(
        name="a pointer of Git LFS for a model", file=READY, path="model", line=4, change=content("model.onnx", POINTER)
    ),
    Mistake(
        name="a model of a newer opset",
        file=READY,
        path="model",
        line=4,
        change=lambda root: write_perceptron(root / "model.onnx", opset=21),
    ),
    Mistake(
        name="rows of another width",
        file=READY,
        path="data.test.inputs.x",
        line=3,
        change=rows(x=np.zeros((ROWS, 5), np.float32)),
    ),
    Mistake(
        name="rows of another type",
        file=READY,
        path="data.test.inputs.x",
        line=3,
        change=rows(x=np.zeros((ROWS, FEATURES))),
    ),
    Mistake(
        name="an input that the model does not take",
        file=READY,
        old="inputs: {x: x}",
        new="inputs: {x: x, z: x}",
        path="data.test.inputs.z",
    ),
    Mistake(
        name="an input that the data lack",
        file=READY,
        old="inputs: {x: x}",
        new="inputs: {input: x}",
        path="data.test.inputs",
    ),
    Mistake(name="labels out of range", file=READY, path="data.test.label", line=3, change=rows(y=np.arange(ROWS) % 5)),
    Mistake(
        name="labels of another kind than the model's",
        file=READY,
        path="data.test.label",
        line=3,
        change=rows(y=np.array(["a", "b"] * (ROWS // 2))),
    ),
    Mistake(
        name="a metric of classes for a model of numbers",
        file=READY,
        path="data.test.label",
        line=3,
        change=write_regressor,
    ),
    Mistake(
        name="a metric of numbers for a model of classes",
        file=READY,
        old="name: accuracy, min: 80%",
        new="name: rmse, max: 2",
        path="data.test.label",
        line=3,
    ),
)
_SAGEMAKER = (
    "provider: sagemaker, settings: {role: 'arn:aws:iam::123456789012:role/r', bucket: models-1, "
    "instance_type: ml.m5.large, image: '123456789012.dkr.ecr.eu-west-1.amazonaws.com/i:1'}, rollout"
)
_AZURE = (
    "provider: azureml, settings: {subscription: 00000000-0000-0000-0000-000000000001, resource_group: g, "
    "workspace: w, instance_type: Standard_DS3_v2, image: 'registry.example/i:1'}, rollout"
)
MACHINE = (
    Mistake(
        name="no credentials for AWS",
        old="rollout",
        new=_SAGEMAKER,
        code=4,
        path="deploy[0].provider",
        environ={"AWS_DEFAULT_REGION": "eu-west-1"},
    ),
    Mistake(name="no region of AWS", old="rollout", new=_SAGEMAKER, code=4, path="deploy[0].provider"),
    Mistake(name="no credentials for Azure", old="rollout", new=_AZURE, code=4, path="deploy[0].provider"),
    Mistake(
        name="no token for servers",
        old="rollout",
        new="metrics: {source: servers, urls: ['http://127.0.0.1:1']}, rollout",
        code=4,
        path="deploy[0].provider",
    ),
    Mistake(
        name="no key to sign with", code=2, path="", line=1, change=written("onnx-ops.toml", "signing = 'required'\n")
    ),
    Mistake(name="a package that is not installed", hidden=("skl2onnx",), code=4, path="export.framework", line=9),
    Mistake(
        name="a module that imports a package that is not installed",
        hidden=("torch",),
        code=4,
        path="train.run",
        line=7,
        change=coded("import numpy", "import torch"),
    ),
)
FILES = (*YAML, *NAMES, *RULES, *OPTIONS, *DATA, *CODES, *MODELS, *MACHINE)


def command(name: str, words: str, change: Change = lambda _: None, code: int = 2) -> Mistake:
    return Mistake(name=name, command=tuple(words.split()), change=change, code=code)


COMMANDS = (
    command("a misspelt command", "chekc configs/pipelines/shop.yaml"),
    command("no file", "run"),
    command("a misspelt option", "run configs/pipelines/shop.yaml --untl gate"),
    command("an unknown stage", "run configs/pipelines/shop.yaml --until gat"),
    command("a word for a number of jobs", "run configs/pipelines/shop.yaml --jobs all"),
    command("a pipeline file that is missing", "run nope.yaml"),
    command("a misspelt pipeline file", "plan configs/pipelines/shp.yaml"),
    command("a folder for a pipeline file", "check configs/pipelines"),
    command("a model for a pipeline file", "run model.onnx"),
    command("an override without a value", "run configs/pipelines/shop.yaml --set export.opset"),
    command("an override of an unknown key", "run configs/pipelines/shop.yaml --set export.opsett=17"),
    command("an override of an entry that is not there", "run configs/pipelines/shop.yaml --set gates[7].max=2"),
    command(
        "a misspelt key in onnx-ops.toml", "check configs/pipelines/shop.yaml", written("onnx-ops.toml", "stor = 'x'\n")
    ),
    command(
        "onnx-ops.toml that is not TOML", "check configs/pipelines/shop.yaml", written("onnx-ops.toml", "store = x\n")
    ),
    command("a misspelt model file", "inspect modle.onnx"),
    command("data for a model", "inspect data/test.npz"),
    command("a folder without a model", "inspect models"),
    command("one model for two", "judge model.onnx"),
    command("data that are missing", "judge model.onnx model.onnx --data nope.npz"),
    command("a label that the data lack", "judge model.onnx model.onnx --data data/test.npz --labels target"),
    command("a limit without a percent sign", "judge model.onnx model.onnx --max-regression 5"),
    command("an unknown target of a tool", "bench model.onnx --target cpu-4"),
    command("an unknown method of a tool", "quantize model.onnx out.onnx --method dinamic"),
    command("an endpoint that is not there", "status nope"),
    command("a rollback of nothing", "rollback"),
    command("an unknown verb of rollouts", "rollout start shop"),
    command("m for minutes in an option", "history shop --since 20m"),
    command("a model without a version", "explain shop"),
    command("a project in a folder that is not empty", "init ."),
    command("an unknown provider of doctor", "doctor --provider aws"),
    command("a notifier that is not set", "notify --test"),
    command("a deletion that is not confirmed", "delete shop"),
)
