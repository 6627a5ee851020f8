"""The search with real quantizers and a real runtime.

One node of the model cannot be quantized.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.files import FileJournal
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.quantization import Budget, SearchRecord
from onnx_ops.domain.target import Target
from onnx_ops.errors import StageError, UserError
from onnx_ops.measure.variants.search import Reporter, SearchResult, search
from onnx_ops.measure.variants.trials import SearchContext, compute_worst_error
from tests.measure.search_parts import LAYERS, SLOW, fragile_ground, write_fragile, write_words

TIMEOUT_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_fragile(tmp_path / "source/model.onnx")
    return tmp_path


def searched(
    context: SearchContext, report: Reporter = lambda _: None, journal: str = "journal"
) -> SearchResult:
    return search(context, FileJournal(context.source.parents[1] / journal), report)


def test_search_of_model_with_fragile_node_keeps_it_in_float(root: Path) -> None:
    lines: list[str] = []
    found = searched(fragile_ground(root), lines.append)
    record = found.record
    dynamic = [t for t in record.trials if t.recipe == "dynamic"]
    assert dynamic[0].drop is not None
    assert dynamic[0].drop > 0.3
    assert [s.node for s in record.sensitivities] == list(LAYERS)
    assert max(record.sensitivities, key=lambda s: s.error or 0.0).node == "first"
    path, trial = found.models["fast"]
    assert (trial.recipe, trial.excluded) == ("dynamic", ("first",))
    assert digest_file(path) == trial.model
    (contribution,) = record.contributions
    assert (contribution.node, contribution.kept) == ("first", True)
    assert contribution.metric > 0.3
    assert contribution.time["cpu-1t"] == pytest.approx(2500 / 2000)
    assert sum(" by " in line and "%" in line for line in lines) >= len(record.trials)
    assert codec.loads(codec.dumps(record), SearchRecord) == record


def test_search_of_embedding_model_quantizes_table_within_budget(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_words(tmp_path / "source/model.onnx")
    record = searched(fragile_ground(tmp_path)).record
    dynamic = next(t for t in record.trials if t.recipe == "dynamic" and not t.excluded)
    assert dynamic.drop == pytest.approx(0, abs=0.05)
    assert dynamic.size_bytes < 0.4 * record.export_bytes
    assert "table" in next(r for r in record.recipes if r.name == "dynamic").nodes
    assert not dynamic.failure


def test_search_with_calibration_rows_uses_7_bits_on_saturating_machine(root: Path) -> None:
    ground = fragile_ground(root, calibrated=True)
    record = searched(replace(ground, section=replace(ground.section, variants=("fast",)))).record
    static = next(t for t in record.trials if t.recipe == "static")
    assert any("7 bits" in note for note in static.notes)
    assert {r.name for r in record.recipes} == {"static", "dynamic"}


def test_search_with_unreachable_size_or_p99_budget_selects_no_model(root: Path) -> None:
    small = searched(fragile_ground(root, budget=Budget(metric_drop=0.1, size=1)))
    assert small.models == {}
    assert "larger" in small.record.slots[0].reason
    shutil.rmtree(root / "trials")
    late = Budget(metric_drop=0.1, p99=2.4e-6)
    found = searched(fragile_ground(root, budget=late), journal="other").record
    assert [t.p99 for t in found.trials if t.recipe == "dynamic" and t.excluded] == [
        {"cpu-1t": pytest.approx(2.5e-6)}
    ]
    assert all(slot.trial is None for slot in found.slots)


def for_two_targets(ground: SearchContext) -> SearchContext:
    """Return the context with a second target, on which int8 is slower.

    Only the first target's processor has VNNI.
    """
    machines = (Arithmetic(family="x86", saturates=False), Arithmetic(family="x86", saturates=True))
    return replace(ground, targets=(*ground.targets, Target(name=SLOW)), machines=machines)


def test_search_for_two_targets_times_each_and_returns_one_variant(root: Path) -> None:
    found = searched(for_two_targets(fragile_ground(root, calibrated=True)))
    record = found.record
    assert record.targets == ("cpu-1t", SLOW)
    assert all(set(t.ratios) == set(record.targets) for t in record.trials if not t.failure)
    assert any("7 bits" in note for t in record.trials if t.recipe == "static" for note in t.notes)
    _, trial = found.models["fast"]
    assert (trial.recipe, trial.excluded) == ("dynamic", ("first",))
    times = {name: one.estimate for name, one in trial.ratios.items()}
    assert times == {"cpu-1t": pytest.approx(2500 / 4000), SLOW: pytest.approx(4600 / 4000)}
    contribution = next(one for one in record.contributions if one.node == "first")
    assert contribution.time == {
        "cpu-1t": pytest.approx(2500 / 2000),
        SLOW: pytest.approx(4600 / 4800),
    }


def test_search_for_two_targets_applies_p99_budget_to_each(root: Path) -> None:
    late = Budget(metric_drop=0.1, p99=4.1e-6)
    record = searched(for_two_targets(fragile_ground(root, budget=late))).record
    (kept,) = [t for t in record.trials if t.recipe == "dynamic" and t.excluded == ("first",)]
    assert kept.p99 == {"cpu-1t": pytest.approx(2.5e-6), SLOW: pytest.approx(4.6e-6)}
    assert all(
        record.trials[slot.trial].recipe != "dynamic"
        for slot in record.slots
        if slot.trial is not None
    )


def test_search_repeated_after_finish_starts_again(root: Path) -> None:
    first = searched(fragile_ground(root)).record
    shutil.rmtree(root / "trials")
    said: list[str] = []
    again = searched(fragile_ground(root), said.append).record
    assert not any("resuming" in line for line in said)
    assert [(t.recipe, t.excluded) for t in again.trials] == [
        (t.recipe, t.excluded) for t in first.trials
    ]


def test_search_resumed_with_different_model_file_raises_stage_error(root: Path) -> None:
    journal = FileJournal(root / "journal")
    searched(fragile_ground(root))
    lines = [line for line in journal.read() if "end" not in line]
    journal.clear()
    for line in lines:
        if line.get("trial"):
            line["trial"]["model"] = f"sha256:{'0' * 64}"
        journal.append(line)
    shutil.rmtree(root / "trials")
    with pytest.raises(StageError, match="a different file"):
        searched(fragile_ground(root))
    shutil.rmtree(root / "trials")
    # The failed search is complete, so a repeated one starts again.
    assert searched(fragile_ground(root)).record.trials


CHILD = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from tests.measure.search_parts import fragile_ground
from onnx_ops import codec
from onnx_ops.adapters.files import FileJournal
from onnx_ops.measure.variants.search import search
root = pathlib.Path(sys.argv[1])
found = search(fragile_ground(root), FileJournal(root / "journal"), lambda line: print(line, flush=True))
(root / "record.json").write_bytes(codec.dumps(found.record))
"""  # noqa: E501


@pytest.mark.parametrize("steps", [1, 4])
def test_search_resumed_after_kill_repeats_no_step(root: Path, steps: int) -> None:
    argv = [sys.executable, "-W", "ignore", "-c", CHILD, str(root), str(Path(__file__).parents[2])]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(steps):
        assert child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.stdout.close()
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    with (root / "journal").open("ab") as stream:
        stream.write(b"torn in the middle of a li")
    before = FileJournal(root / "journal").read()
    assert len(before) >= steps
    shutil.rmtree(root / "trials")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.startswith(f"resuming after {len(before)} steps")
    after = FileJournal(root / "journal").read()
    assert after[: len(before)] == before
    trials = [
        (line["trial"]["recipe"], tuple(line["trial"]["excluded"]))
        for line in after
        if line.get("trial")
    ]
    assert len(trials) == len(set(trials))
    record = json.loads((root / "record.json").read_text())
    assert record["slots"][0]["trial"] is not None


def test_file_journal_with_damaged_line_keeps_entries_before_it(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "deep/journal")
    assert journal.read() == ()
    for number in range(4):
        journal.append({"n": number})
    lines = (tmp_path / "deep/journal").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"n": 2', b'"n": 9')
    (tmp_path / "deep/journal").write_bytes(b"".join(lines))
    assert journal.read() == ({"n": 0}, {"n": 1})
    journal.append({"n": 5})
    assert journal.read() == ({"n": 0}, {"n": 1}, {"n": 5})
    journal.clear()
    assert journal.read() == ()


def test_compute_worst_error_ignores_equal_nonfinite_values_and_returns_largest_error() -> None:
    exact = {"a": np.array([1.0, 3.0], np.float32), "b": np.array([0.0, 4.0, np.nan, np.inf])}
    answers = {"a": np.array([1.0, 3.0], np.float32), "b": np.array([0.0, 5.0, np.nan, np.inf])}
    assert compute_worst_error(exact, answers) == pytest.approx(0.5**0.5 / 2)


@pytest.mark.parametrize(
    ("truth", "answer"), [(1.0, np.nan), (1.0, np.inf), (np.nan, 1.0), (np.inf, -np.inf)]
)
def test_compute_worst_error_of_unequal_nan_or_infinite_values_raises_user_error(
    truth: float, answer: float
) -> None:
    with pytest.raises(UserError, match="NaN or infinite"):
        compute_worst_error({"a": np.array([0.0, truth])}, {"a": np.array([0.0, answer])})
