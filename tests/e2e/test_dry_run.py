"""Dry runs of commands on a real project.

They change no file, and list what the command then does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project
from tests.support.command import run_command

pytestmark = pytest.mark.services

MODEL = "digits-mlp"


def read_files(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file of a project, by path."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def preview(project: Project, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the document of a dry run, after which every file must be unchanged."""
    before = read_files(project.root)
    shown = run_command(
        *arguments, "--dry-run", "--json", cwd=project.root, environ=project.environment(None)
    )
    after = read_files(project.root)
    assert {name for name in before.keys() | after if before.get(name) != after.get(name)} == set()
    document: dict[str, Any] = shown.parsed(code)
    return document


def test_dry_runs_change_no_file_and_rollback_does_what_its_dry_run_lists(twice: Project) -> None:
    old = twice.status()["roles"]["previous"]["name"]
    preview(twice, "reconcile")
    preview(twice, "promote", f"{MODEL}/1", "--target", "cpu-1t")
    preview(twice, "rollout", "pause", "digits", code=2)
    removed = preview(twice, "delete", "digits", "--reason", "old")["changes"]
    assert [change["after"] for change in removed if change["kind"] == "traffic"] == ["none"]
    pruned = preview(twice, "prune", MODEL, "--keep", "0", "--older-than", "0d")["changes"]
    assert {change["kind"] for change in pruned} <= {"version", "model-folder", "stored-object"}
    planned = preview(twice, "run", MLP, "--set", ONLY_FP32, "--set", "train.with.seed=9")
    assert planned["deploy"]["changes"] == []
    (note,) = planned["deploy"]["notes"]
    new = twice.status()["roles"]["stable"]["name"]
    assert note.startswith(f"digits: {new} serves; a release that passes")
    bound = preview(
        twice,
        "run",
        MLP,
        "--set",
        ONLY_FP32,
        "--set",
        SECOND,
        "--set",
        "deploy[0].rollout.scale_down_delay=2 h",
    )["deploy"]["changes"]
    assert [change["kind"] for change in bound] == ["ledger-entry"]
    assert "bound to digits-mlp" in bound[0]["after"]
    predicted = preview(twice, "rollback", "digits", "--reason", "slow")
    twice.document("rollback", "digits", "--reason", "slow", "--wait")
    entries = [c for c in predicted["changes"] if c["kind"] == "ledger-entry"]
    traffic = [c["after"] for c in predicted["changes"] if c["kind"] == "traffic"]
    written = twice.document("history", "digits")[-len(entries) :]
    assert [c["what"].split()[2] for c in entries] == [str(e["sequence"]) for e in written]
    texts = [f"{e['what']} ({e['why']})" if e["why"] else e["what"] for e in written]
    assert [c["after"] for c in entries] == texts
    assert traffic == [f"{old} 100 %"]
    assert twice.status()["traffic"][old] == 100
    assert predicted["rollbacks"] == [{"endpoint": "digits", "to": old, "why": ""}]
