"""A model larger than a protobuf may be, through a whole pipeline: how much memory does each process take?

    python -m benchmarks.large_model [--layers N]

Makes a model of N layers with 64 MiB of weights each in a file beside it (34 layers: 2.28 GB), runs it from export to
registration in a project of its own, and prints the largest private memory of each process. Takes some minutes, and
disk for about five copies. Ends 1 if the run fails, or a process takes more than `MOST` times the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

WIDTH = 4096
MOST = 1.5
PIPELINE = """\
pipeline: large
data: {test: {file: rows.npz, inputs: {x: x}}}
model: models
export: {framework: onnx}
validate: {samples: {data: test, limit: 16}}
benchmark: {targets: [cpu-1t]}
gates: [{kind: parity}]
register: {model: large, promote: manual}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=34)
    layers = parser.parse_args().layers
    with tempfile.TemporaryDirectory(prefix="onnx-ops-large-") as name:
        folder = Path(name)
        size = write_project(folder, layers)
        begun = time.perf_counter()
        code, peaks = run(folder)
        print(f"model {size / 1e9:.2f} GB, exit code {code}, {time.perf_counter() - begun:.0f} s")
        for peak, what in sorted(peaks, reverse=True)[:5]:
            print(f"{peak / 1e9:6.2f} GB  {peak / size:4.2f} of the model  {what}")
    return int(code != 0 or max(peak for peak, _ in peaks) > MOST * size)


def write_project(folder: Path, layers: int) -> int:
    """Bytes of the model's weights."""
    draw = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        matrix = draw.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(np.sqrt(WIDTH))
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"product{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"product{layer}"], [f"layer{layer}"]))
        value = f"layer{layer}"
    nodes[-1].output[0] = "y"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (folder / "models").mkdir()
    path = folder / "models" / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(folder / "rows.npz", x=draw.standard_normal((16, WIDTH)).astype(np.float32))
    (folder / "large.yaml").write_text(PIPELINE, encoding="utf-8")
    (folder / "onnx-ops.toml").write_text("", encoding="utf-8")
    return (folder / "models" / "weights.bin").stat().st_size


def run(folder: Path) -> tuple[int, list[tuple[int, str]]]:
    """The exit code, and for each process the most private memory that was seen of it."""
    process = subprocess.Popen([sys.executable, "-m", "onnx_ops", "run", "large.yaml"], cwd=folder)
    root = psutil.Process(process.pid)
    peaks: dict[int, tuple[int, str]] = {}
    while process.poll() is None:
        for one in [root, *root.children(recursive=True)]:
            try:
                private, what = one.memory_full_info().uss, " ".join(one.cmdline()[1:])
            except psutil.Error:  # it has ended meanwhile
                continue
            if private > peaks.get(one.pid, (0, ""))[0]:
                peaks[one.pid] = private, what
        time.sleep(0.2)
    return process.returncode, list(peaks.values())


if __name__ == "__main__":
    sys.exit(main())
