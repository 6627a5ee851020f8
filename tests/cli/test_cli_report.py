"""`onnx-ops report`: the stored page of a version, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from onnx_ops.app import project
from onnx_ops.cli.main import app
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.release import Lineage, Publication, VariantRecord
from onnx_ops.testing.fakes import FakeWorld

PAGE = "<!doctype html><title>é</title>"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in a project whose registry holds digits/1 with a report, and digits/2 without one."""
    world = FakeWorld()
    model, page = tmp_path / "model.onnx", tmp_path / "page.html"
    model.write_bytes(b"model")
    page.write_text(PAGE, encoding="utf-8")
    for variant, evidence in (("fp32", {"report.html": page}), ("int8", {})):
        record = VariantRecord(
            variant=variant,
            files={"model.onnx": model},
            manifest=Manifest(files={"model.onnx": digest_file(model)}),
            evidence=evidence,
            metrics={},
            decisions={},
            signed={},
            description="",
        )
        lineage = Lineage(pipeline="p", release=digest_bytes(b"release"))
        world.registry.publish(Publication(model="digits", lineage=lineage, variants=(record,)))
    monkeypatch.setattr(project, "open_project", lambda: SimpleNamespace(ports=world.ports(root=tmp_path)))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_the_page_is_written_and_its_path_printed(here: Path) -> None:
    done = CliRunner().invoke(app, ["report", "digits/v1"])
    assert (done.exit_code, done.stdout) == (0, "digits-1.html\n")
    assert (here / "digits-1.html").read_text(encoding="utf-8") == PAGE


def test_output_names_the_file(here: Path) -> None:
    done = CliRunner().invoke(app, ["report", "digits/1", "--output", "out.html"])
    assert (done.exit_code, done.stdout) == (0, "out.html\n")
    assert (here / "out.html").read_text(encoding="utf-8") == PAGE


def test_json_tells_the_same(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["report", "digits/1", "--json"])
    assert done.exit_code == 0
    document = json.loads(done.stdout or capfd.readouterr().out)
    assert document == {"model": "digits", "version": "1", "report": "digits-1.html"}
    assert (here / "digits-1.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["digits"], 2, "'digits' is not MODEL/VERSION"),
        (["digits/2"], 2, "no document report.html"),
        (["digits/9"], 2, "no such version"),
        (["digits/1", "-o", "no/such/folder.html"], 2, "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_told_without_a_traceback(
    here: Path, arguments: list[str], code: int, told: str
) -> None:
    done = CliRunner().invoke(app, ["report", *arguments])
    assert done.exit_code == code, done.output
    assert told in done.output
    assert "Traceback" not in done.output
    assert list(here.iterdir()) == []


def test_help_shows_an_example() -> None:
    done = CliRunner().invoke(app, ["report", "--help"])
    assert "Example: onnx-ops report digits-mlp/3" in " ".join(done.stdout.split())
