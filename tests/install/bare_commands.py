"""Every command of the command line, and its output with the base only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np

from onnx_ops.scratch import write_durably
from onnx_ops.testing.fakes import FakeSigner
from onnx_ops.testing.models import rows, write_perceptron
from tests.release import release_parts
from tests.release.disk_scenes import on_disk
from tests.release.release_scenes import serving

PIPELINES = {
    "alone": "",
    "released": "register: {model: released, promote: auto}\n"
    "deploy: {endpoint: released, provider: local, target: cpu-1t}\n",
    "cloud": "register: {model: cloud, promote: auto}\n"
    "deploy: {endpoint: cloud, provider: sagemaker, target: cpu-1t, options: "
    "{bucket: models-of-x, role: 'arn:aws:iam::123456789012:role/x', "
    "image: '123456789012.dkr.ecr.eu-west-1.amazonaws.com/onnx-ops:1'}}\n",
    "tidied": "quantize: [{name: tidy, method: onnxslim}]\n",
}
PIPELINE = """\
pipeline: {name}
data: {{test: {{file: rows.npz, inputs: {{x: x}}}}}}
model: model.onnx
export: {{framework: onnx}}
benchmark: {{targets: [cpu-1t]}}
gates: [{{kind: parity}}]
"""
TRAINED = """\
pipeline: trained
data: {test: {sklearn: digits, split: test, inputs: {x: data}, label: target}}
train: {run: 'code:train'}
export: {framework: sklearn}
benchmark: {targets: [cpu-1t]}
register: {model: trained}
"""
SOURCE = """\
import numpy as np
import onnxruntime

import onnx_ops


def predict(row):
    x = onnx_ops.record_step("input", np.array([row["x"]], dtype=np.float32))
    session = onnxruntime.InferenceSession("model.onnx")
    return session.run(None, {session.get_inputs()[0].name: x})[0]
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A command line, its exit code, and its output.

    `extras` are those that the output names for installation, in order.
    """

    line: str
    code: int
    says: str = ""
    extras: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    works: bool = False
    """Whether the command does real work, which takes seconds."""

    @property
    def arguments(self) -> list[str]:
        return self.line.split()


CALLS = (
    Call("--version", 0, "onnx-ops"),
    Call("init fraud --preset sklearn", 0, "Created"),
    Call(
        "check --static alone.yaml released.yaml cloud.yaml tidied.yaml trained.yaml",
        0,
        "no problems",
    ),
    Call("check released.yaml", 4, "needs mlflow, which is not installed"),
    Call("plan trained.yaml", 0, "register"),
    Call("run alone.yaml --quiet", 0, "PASS cpu-1t", works=True),
    Call("run released.yaml", 4, "deploy/released needs httptools", extras="mlflow,serve"),
    Call(
        "run released.yaml --until gate", 4, "benchmark/fp32@cpu-1t needs mlflow", extras="mlflow"
    ),
    Call("run cloud.yaml", 4, "deploy/cloud needs boto3", extras="aws,mlflow"),
    Call("run tidied.yaml", 4, "quantize/tidy needs onnxslim", extras="passes"),
    Call("run trained.yaml", 4, "export needs skl2onnx", extras="mlflow,sklearn"),
    Call("run released.yaml trained.yaml --quiet", 4, "2 pipelines: 0 done"),
    Call("affected", 2, "cannot open a repository"),
    Call("explain m/1", 4, "onnx-ops explain, registry: package mlflow", extras="mlflow"),
    Call("report m/1", 4, "onnx-ops report, registry: package mlflow", extras="mlflow"),
    Call("export-dvc m/1", 4, "onnx-ops export-dvc, registry: package mlflow", extras="mlflow"),
    Call("recheck", 4, "onnx-ops recheck, registry: package mlflow", extras="mlflow"),
    Call(
        "promote digits/1 -t cpu", 4, "onnx-ops promote, registry: package mlflow", extras="mlflow"
    ),
    Call("forecast released.yaml --rate 5/s", 0, "waits for `onnx-ops rollout advance`"),
    Call("forecast digits --rate 5/s", 0, "waits for `onnx-ops rollout advance`"),
    Call("rollout status digits", 0, "no rollout in progress"),
    Call(
        "rollout pause digits",
        4,
        "onnx-ops rollout pause, registry: package mlflow",
        extras="mlflow",
    ),
    Call("rollout abort digits", 2, "no rollout is in progress"),
    Call("reconcile", 4, "onnx-ops reconcile, registry: package mlflow", extras="mlflow"),
    Call(
        "reconcile digits --watch",
        4,
        "onnx-ops reconcile, registry: package mlflow",
        extras="mlflow",
    ),
    Call("webhooks check", 4, "onnx-ops webhooks check, registry: package mlflow", extras="mlflow"),
    Call("notify", 2, "no notifier is set"),
    Call(
        "notify --test",
        4,
        "onnx-ops notify, notifier prefect-events: package prefect",
        extras="prefect",
        environ={"ONNX_OPS_NOTIFY": "prefect-events"},
    ),
    Call("status", 4, "digits"),
    Call(
        "plan alone.yaml",
        4,
        "s3://b/x: package s3fs",
        extras="s3",
        environ={"ONNX_OPS_STORE": "s3://b/x"},
    ),
    Call("history digits", 0, "digits"),
    Call("console", 4, "onnx-ops console: packages starlette", extras="console"),
    Call("prune digits", 4, "onnx-ops prune, registry: package mlflow", extras="mlflow"),
    Call(
        "rollback digits --reason slow --wait",
        4,
        "accepted, still pending: all traffic to v1",
        extras="serve",
    ),
    Call(
        "reconcile digits",
        4,
        "onnx-ops reconcile, endpoint digits: packages httptools",
        extras="serve",
    ),
    Call("rollback --withdraw digits --reason no", 0, "is withdrawn"),
    Call("delete digits --yes", 0, "digits: deleted"),
    Call("analysis status analysis.yaml", 2, "no such file"),
    Call("inspect model.onnx", 0, "opset"),
    Call(
        "inspect model.onnx --serve", 4, "onnx-ops inspect, --serve: package netron", extras="view"
    ),
    Call(
        "judge model.onnx model.onnx --only parity --html judgement.html --quiet",
        0,
        "PASS",
        works=True,
    ),
    Call(
        "judge --system source:predict --files rows.jsonl model.onnx --tolerance files=8 --quiet",
        0,
        "PASS",
        works=True,
    ),
    Call("judge --system source:predict --files none model.onnx", 2, "no such folder or file"),
    Call("bench model.onnx --runs 20 --quiet", 0, "p50", works=True),
    Call("quantize model.onnx small.onnx --method dynamic", 0, "int8"),
    Call(
        "quantize model.onnx slim.onnx --method onnxslim", 4, "onnx-ops quantize", extras="passes"
    ),
    Call("serve --state-dir served", 4, "onnx-ops serve: packages httptools", extras="serve"),
    Call("doctor", 0, "onnx-ops[mlflow]"),
    Call("targets", 0, "cpu-1t"),
    Call("work --pool gpu", 4, "onnx-ops work, pools: package prefect", extras="prefect"),
    Call("keys new", 2, "a file already exists"),
    Call("keys list", 0),
    Call("docs runbooks/rollback-now", 0, "# "),
    Call("ledger adopt digits", 5, "the ledger is intact"),
)


def make_project(folder: Path) -> None:
    """Write a project without a server, whose endpoint has a ledger of two releases."""
    folder.mkdir(exist_ok=True)
    (folder / "onnx-ops.toml").touch()
    write_perceptron(folder / "model.onnx")
    np.savez(folder / "rows.npz", allow_pickle=False, **rows(64))
    (folder / "source.py").write_text(SOURCE, encoding="utf-8")
    lines = [json.dumps({"x": row.tolist()}) for row in rows(8)["x"]]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, rest in PIPELINES.items():
        (folder / f"{name}.yaml").write_text(PIPELINE.format(name=name) + rest, encoding="utf-8")
    (folder / "trained.yaml").write_text(TRAINED, encoding="utf-8")
    (folder / "code.py").write_text("import sklearn\n\n\ndef train(data): ...\n", encoding="utf-8")
    config = release_parts.config_of("digits")
    local = type(config)(
        **{**{name: getattr(config, name) for name in config.__slots__}, "provider": "local"}
    )
    keys = folder / ".onnx-ops" / "keys"
    keys.mkdir(parents=True)
    # A server that has ended leaves this folder.
    (folder / ".onnx-ops" / "endpoints" / "digits").mkdir(parents=True)
    (keys / "signing.pub.pem").write_bytes(FakeSigner().public_pem())
    write_durably(keys / "signing.pem", FakeSigner().private_pem())
    with on_disk(folder), patch.object(release_parts, "config_of", lambda _: local):
        serving("a", "b")
