"""The main job on scikit-learn's bundled digits: one pipeline file from training to an answering endpoint."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = "configs/pipelines/digits-mlp.yaml"
ENDPOINT, MODEL = "digits", "digits-mlp"
REQUEST = ROOT / ".onnx-ops" / "request.json"
ONNX_OPS = Path(sys.executable).with_name("onnx-ops")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stop", action="store_true", help="stop the endpoint's server")
    if parser.parse_args().stop:
        return stop()
    code = subprocess.run([ONNX_OPS, "run", PIPELINE], cwd=ROOT, check=False).returncode
    if code:
        return code
    address = json.loads(output("status", ENDPOINT, "--json"))[0]["address"]
    url = f"{address}/v2/models/{MODEL}/infer"
    show_answer(url)
    print_next_steps(url)
    return 0


def stop() -> int:
    from onnx_ops.adapters.endpoints.local import LocalEndpoints
    from onnx_ops.operations.journal import Journal
    from onnx_ops.wiring.project import open_project

    project = open_project(ROOT)
    LocalEndpoints(project.settings.endpoints).stop(Journal.open(project.ports, ENDPOINT).config)
    print(f"The server of endpoint {ENDPOINT} is stopped; `onnx-ops reconcile {ENDPOINT}` starts it again.")
    return 0


def output(*arguments: str) -> str:
    return subprocess.run([ONNX_OPS, *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def show_answer(url: str) -> None:
    """Ask the endpoint about one digit, over HTTP, as any client would."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    image, label = digits.data[1234], int(digits.target[1234])
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [float(v) for v in image]}
    REQUEST.write_text(json.dumps({"inputs": [tensor]}), encoding="utf-8")
    print("\nOne digit for the endpoint:")
    for row in image.reshape(8, 8):
        print("   " + "".join(" .:-=+*#%@"[int(v * 9 / 16)] * 2 for v in row))
    request = urllib.request.Request(
        url, data=REQUEST.read_bytes(), headers={"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    outputs = {tensor["name"]: tensor["data"] for tensor in answer["outputs"]}
    print(f"   it is a {label}; the endpoint answers {outputs['label'][0]}")


def print_next_steps(url: str) -> None:
    print(
        f"""
What to try next (`. .venv/bin/activate` first):
  ask the endpoint         curl -s {url} -H 'content-type: application/json' -d @{REQUEST.relative_to(ROOT)}
  run it again             onnx-ops run {PIPELINE}        # nothing changed: nothing runs
  make a second release    onnx-ops run {PIPELINE} --set train.with.seed=8
  go back at once          onnx-ops rollback {ENDPOINT} --reason 'trying it out'
  what happened            onnx-ops history {ENDPOINT}
  see it in MLflow         the `mlflow server` line above, then http://127.0.0.1:5000
  stop the endpoint        make demo-stop"""
    )


if __name__ == "__main__":
    sys.exit(main())
