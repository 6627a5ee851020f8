"""Release a model of scikit-learn's bundled digits three times, and roll back.

One pipeline file describes the model, and the endpoint is under load. The first release serves
immediately. The second goes through a canary. The third fails a gate, is promoted all the same, and
is rolled back by its canary. Then an operator goes back to the first.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = "configs/pipelines/digits-mlp.yaml"
ENDPOINT, MODEL = "digits", "digits-mlp"
REQUEST = ROOT / ".onnx-ops" / "request.json"
BEGUN = REQUEST.with_name("demo-begun")
"""Marks a folder in which the demo has run.

Its releases cannot be repeated, since a release that was rolled back stays rejected.
"""
ONNX_OPS = str(Path(sys.executable).with_name("onnx-ops"))
CONNECTIONS, USERS = 4, 2000
CALM_S = 6
"""Seconds of load before a rollout.

A candidate is compared with the latencies of the version in service.
"""
RED = 1
"""Exit code of a failed gate, and of a rollout that was rolled back."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stop", action="store_true", help="stop the endpoint's server")
    if parser.parse_args().stop:
        return stop()
    if BEGUN.exists():
        print(
            "The demo has run here already. To run it again: make demo-stop && rm -r .onnx-ops "
            "&& make demo"
        )
        return 2
    heading("1. A first release: from training to an answering endpoint")
    if code := onnx_ops("run", PIPELINE):
        return code
    address = json.loads(output("status", ENDPOINT, "--json"))[0]["address"]
    url = f"{address}/v2/models/{MODEL}/infer"
    show_answer(url)
    load = Load(url)
    try:
        releases(load)
    finally:
        load.end()
    heading("What happened")
    expect(0, "history", ENDPOINT, "--traffic")
    print(f"\n{load.sent} requests were sent, {load.failed} failed.")
    print_next_steps(url)
    return 0 if load.failed == 0 else 1


def releases(load: Load) -> None:
    """Make a good second release, a bad third one, and a rollback.

    Raises:
        SystemExit: one of them ends otherwise.
    """
    BEGUN.touch()
    load.run_for(CALM_S)
    heading("2. A second release: 10 %, 50 %, 100 % of the traffic, judged at each step")
    release("train.with.seed=8", passes=True)
    roll_out(load, ends=0)
    load.run_for(CALM_S)
    heading("3. A third, 50 times the size: its gate fails, an operator overrides it")
    version = release("train.with.hidden=[512, 512]", passes=False)
    expect(
        0,
        "promote",
        f"{MODEL}/{version}",
        "--target",
        "cpu-1t",
        "--override",
        "--reason",
        "bigger is better",
    )
    roll_out(load, ends=RED)
    heading("4. An operator goes back to the first release")
    expect(0, "rollback", ENDPOINT, "--to", "1", "--reason", "wrong on sevens")


class Load:
    """Users who send one digit at a time over a few connections, while `running`.

    `sent` and `failed` count their requests.
    """

    def __init__(self, url: str) -> None:
        self.sent = self.failed = 0
        self._address = urlsplit(url)
        self._on, self._lock, self._ended = threading.Event(), threading.Lock(), False
        self._bodies = [json.dumps(question(row)).encode() for row in load_digits().data]
        self._threads = [
            threading.Thread(target=self._send, args=(seed,)) for seed in range(CONNECTIONS)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()

    def run_for(self, seconds: float) -> None:
        with self.running():
            time.sleep(seconds)

    def end(self) -> None:
        self._ended = True
        self._on.set()
        for thread in self._threads:
            thread.join()

    def _send(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        connection = http.client.HTTPConnection(self._address.netloc, timeout=30)
        while self._on.wait() and not self._ended:
            headers = {
                "content-type": "application/json",
                "x-user-key": f"user-{draw.integers(USERS)}",
            }
            body = self._bodies[draw.integers(len(self._bodies))]
            try:
                connection.request("POST", self._address.path, body, headers)
                answer = connection.getresponse()
                answer.read()
                good = answer.status == http.client.OK
            except (OSError, http.client.HTTPException):
                connection.close()
                good = False
            with self._lock:
                self.sent += 1
                self.failed += not good
        connection.close()


def roll_out(load: Load, *, ends: int) -> None:
    """Let a reconciler judge the rollout under load and move traffic, until it ends.

    In production, the reconciler is a service.
    """
    reconcile = ("reconcile", ENDPOINT, "--watch", "--interval", "1s")
    show_command(*reconcile)
    with load.running(), subprocess.Popen([ONNX_OPS, *reconcile], cwd=ROOT) as reconciler:
        follow = [ONNX_OPS, "rollout", "status", ENDPOINT, "--watch", "--interval", "1s", "--json"]
        code = subprocess.run(follow, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode
        reconciler.terminate()
    if code != ends:
        raise SystemExit(f"the rollout ended with {code} where the demo expects {ends}")


def stop() -> int:
    from onnx_ops.adapters.endpoints.local import LocalEndpoints
    from onnx_ops.app.context import open_project
    from onnx_ops.release.journal import Journal

    project = open_project(ROOT)
    LocalEndpoints(project.settings.endpoints).stop(Journal.open(project.context, ENDPOINT).config)
    print(
        f"The server of endpoint {ENDPOINT} is stopped; `onnx-ops reconcile {ENDPOINT}` starts "
        "it again."
    )
    return 0


def heading(text: str) -> None:
    print(f"\n── {text} ──", flush=True)


def onnx_ops(*arguments: str) -> int:
    show_command(*arguments)
    return subprocess.run([ONNX_OPS, *arguments], cwd=ROOT, check=False).returncode


def show_command(*arguments: str) -> None:
    words = " ".join(f"'{word}'" if " " in word else word for word in arguments)
    print(f"$ onnx-ops {words}", flush=True)


def expect(code: int, *arguments: str) -> None:
    if (found := onnx_ops(*arguments)) != code:
        raise SystemExit(f"exit code {found} where the demo expects {code}")


def release(change: str, *, passes: bool) -> str:
    """Run the pipeline with a change, and print its verdicts.

    Return the version of its fp32 variant.
    """
    show_command("run", PIPELINE, "--set", change)
    command = [ONNX_OPS, "run", PIPELINE, "--set", change, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != (0 if passes else RED):
        raise SystemExit(f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    document = json.loads(done.stdout)
    for decision in document["decisions"]:
        for result in decision["results"]:
            if (
                decision["variant"] == "fp32"
                and result["verdict"] == "fail"
                and not result["advisory"]
            ):
                print(f"FAIL {result['gate']}: {result['reason']}")
    for choice in document["choices"] if passes else ():
        print(f"{choice['verdict'].upper()} {choice['target']}: {choice['reason']}")
    return str(document["registration"]["versions"]["fp32"])


def output(*arguments: str) -> str:
    return subprocess.run(
        [ONNX_OPS, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def question(image: np.ndarray) -> dict[str, object]:
    """Return a request with one digit, as the Open Inference Protocol defines it."""
    data = [float(value) for value in image]
    return {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": data}]}


def show_answer(url: str) -> None:
    """Send one digit to the endpoint over HTTP, and print the answer."""
    digits = load_digits()
    image, label = digits.data[1234], int(digits.target[1234])
    REQUEST.write_text(json.dumps(question(image)), encoding="utf-8")
    print("\nOne digit for the endpoint:")
    for row in image.reshape(8, 8):
        print("   " + "".join(" .:-=+*#%@"[int(v * 9 / 16)] * 2 for v in row))
    request = urllib.request.Request(
        url, data=REQUEST.read_bytes(), headers={"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    outputs = {tensor["name"]: tensor["data"] for tensor in answer["outputs"]}
    print(f"   it is a {label}; the endpoint answers {outputs['label'][0]}", flush=True)


def print_next_steps(url: str) -> None:
    print(
        "\nWhat to try next (`. .venv/bin/activate` first):\n"
        f"  ask the endpoint         curl -s {url} -H 'content-type: application/json' "
        f"-d @{REQUEST.relative_to(ROOT)}\n"
        f"  run it again             onnx-ops run {PIPELINE}        "
        "# all results are cached\n"
        f"  the report               onnx-ops report {MODEL}/1\n"
        f"  all that happened        onnx-ops history {ENDPOINT}\n"
        "  see it in MLflow         the `mlflow server` line above, then http://127.0.0.1:5000\n"
        "  stop the endpoint        make demo-stop"
    )


if __name__ == "__main__":
    sys.exit(main())
