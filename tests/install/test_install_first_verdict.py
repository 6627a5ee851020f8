"""The first screen of the README, followed by a new user.

The user has the built wheel and two files of another tool.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from tests.docs.docs_blocks import blocks_of
from tests.install.bare_environments import ROOT, build_wheel, environ_of
from tests.install.workflow_runner import bare_path

# The test installs the base into a new environment, which takes a minute.
pytestmark = pytest.mark.nightly


def write_files(folder: Path) -> None:
    """Write a model exported by PyTorch, and one quantized by ONNX Runtime.

    Their names are `fp32.onnx` and `int8.onnx`.
    """
    # torch is slow to import, so it is imported only when the test runs.
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 16 * 16, 10),
    )
    torch.onnx.export(
        network.eval(),
        (torch.randn(4, 3, 32, 32),),
        folder / "fp32.onnx",
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
    )
    # ONNX Runtime's quantizer (1.31) rejects the shapes of weights that PyTorch 2.13 has recorded.
    model = onnx.load(folder / "fp32.onnx")
    del model.graph.value_info[:]
    onnx.save(model, folder / "plain.onnx")
    quantize_dynamic(folder / "plain.onnx", folder / "int8.onnx")


# The exporter of torch causes warnings.
@pytest.mark.filterwarnings("ignore")
def test_first_readme_commands_judge_local_models(tmp_path: Path) -> None:
    write_files(tmp_path)
    build_wheel(tmp_path / "source", tmp_path / "dist")
    install = blocks_of(ROOT / "README.md")[0]
    assert install.language == "bash"
    environ = environ_of(tmp_path) | {"PATH": bare_path(tmp_path / "tools")}
    done = subprocess.run(
        ["bash", "-e", "-c", install.text],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    verdicts = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
    (first,) = re.findall(r"^(\w+) int8\.onnx against fp32\.onnx on cpu-1t$", done.stdout, re.M)
    assert verdicts[first] == done.returncode, done.stderr
    assert first != "PASS", "generated rows cannot show what rounding costs"
    assert "pass real rows with --data FILE" in done.stdout
