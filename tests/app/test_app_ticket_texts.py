"""The example of texts: its data, its export, and the project's own code against the export."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export, FileData
from onnx_ops.ports import Dataset
from onnx_ops.ports.export import ExportRequest
from tests.serving.serving_process import deploy, load_once
from tests.support.checkout import copy_parts
from tests.support.command import run_command
from tests.support.processes import ROOT

JUDGE = (
    *("judge", "--system", "examples.ticket_texts:predict"),
    *("--files", "examples/data/tickets-test.csv"),
    *("--before", "input=examples.ticket_texts:read_text"),
    *("--after", "team=examples.ticket_texts:name_team"),
)
ODD_TEXTS = ("", " \t\n", "GRÜEZI, İstanbul", "cafe\u0301 ﬁle", "😀 crash 👩\u200d💻", "x" * 4000)


@pytest.fixture
def example() -> Any:
    pytest.importorskip("sklearn")
    return importlib.import_module("examples.ticket_texts")


def test_ticket_files_equal_what_example_writes(example: Any, tmp_path: Path) -> None:
    example.write_tickets(tmp_path)

    for part in ("train", "test"):
        name = f"tickets-{part}.csv"
        assert (tmp_path / name).read_bytes() == (ROOT / "examples/data" / name).read_bytes()


def test_export_of_ticket_texts_answers_raw_texts_like_source(example: Any, tmp_path: Path) -> None:
    import onnxruntime as ort

    model, texts = train(example), load("test")["text"]
    export(model, tmp_path / "model.onnx")

    session = ort.InferenceSession(tmp_path / "model.onnx")
    rows = [*texts[:, 0].tolist(), *ODD_TEXTS]
    label, probabilities = session.run(None, {"text": np.array(rows, dtype=object)[:, None]})
    np.testing.assert_allclose(probabilities, model.predict_proba(rows), atol=1e-5)
    assert label.tolist() == model.predict(rows).tolist()
    assert load_once(deploy(tmp_path)).signature.pads_texts


def test_judge_of_ticket_system_passes_and_names_wrong_step(example: Any, tmp_path: Path) -> None:
    copy_parts(tmp_path, "examples")
    export(train(example), tmp_path / "model.onnx")
    wrong = tmp_path / "client.py"
    wrong.write_text(
        "from examples.ticket_texts import read_text\n"
        "def cut(ticket):\n    return read_text({'text': ticket['text'][:20]})\n"
    )

    passed = run_command(*JUDGE, "model.onnx", "--quiet", cwd=tmp_path)
    other = ["input=client:cut" if "read_text" in word else word for word in JUDGE]
    failed = run_command(*other, "model.onnx", "--quiet", cwd=tmp_path)

    assert (passed.code, passed.stdout.split()[0]) == (0, "PASS"), passed.stdout + passed.stderr
    assert failed.code == 1, failed.stdout + failed.stderr
    assert failed.stdout.splitlines()[1].startswith("input: "), failed.stdout


def load(part: str) -> dict[str, Any]:
    arrays = FileSource().load(FileData(file=f"examples/data/tickets-{part}.csv"), ROOT)
    return dict(arrays)


def train(example: Any) -> Any:
    arrays = load("train")
    rows = Dataset(inputs={"text": arrays["text"]}, label=arrays["team"][:, 0])
    return example.train({"train": rows})


def export(model: Any, path: Path) -> None:
    samples = {"text": load("test")["text"]}
    SklearnExporter().export(
        model, ExportRequest(section=Export(framework="sklearn"), samples=samples, path=path)
    )
