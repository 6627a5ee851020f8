"""`onnx-ops report`: the stored page of a version, as a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from onnx_ops.app import context
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.release import Lineage, Publication, VariantRecord
from onnx_ops.testing.fakes import FakeWorld
from tests.support.command import run_command

PAGE = "<!doctype html><title>é</title>"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in a project whose registry contains two versions.

    digits/1 has a report, and digits/2 has none.
    """
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
        )
        lineage = Lineage(pipeline="p", release=digest_bytes(b"release"))
        world.registry.publish(Publication(model="digits", lineage=lineage, variants=(record,)))
    monkeypatch.setattr(
        context, "open_project", lambda: SimpleNamespace(context=world.context(root=tmp_path))
    )
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.mark.parametrize(
    ("arguments", "file"),
    [(["digits/v1"], "digits-1.html"), (["digits/1", "--output", "out.html"], "out.html")],
)
def test_report_writes_page_and_prints_its_path(
    here: Path, arguments: list[str], file: str
) -> None:
    done = run_command("report", *arguments, cwd=here)
    assert (done.code, done.stdout) == (0, f"{file}\n")
    assert (here / file).read_text(encoding="utf-8") == PAGE
    document = run_command("report", *arguments, "--json", cwd=here).parsed()
    assert document == {"model": "digits", "version": "1", "report": file}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["digits"], 2, "'digits' is not MODEL/VERSION"),
        (["digits/2"], 2, "no document report.html"),
        (["digits/9"], 2, "no such version"),
        (["digits/1", "-o", "no/such/folder.html"], 2, "cannot be written"),
    ],
)
def test_report_with_wrong_arguments_prints_error_without_traceback(
    here: Path, arguments: list[str], code: int, expected: str
) -> None:
    done = run_command("report", *arguments, cwd=here)
    assert done.code == code, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert list(here.iterdir()) == []
