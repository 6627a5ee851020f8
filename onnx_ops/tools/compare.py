"""Compare two ONNX files: check whether they compute the same function.

The noise of correct answers cannot be measured: this needs a source in float64. The reference is
A's answers without graph optimizations. The noise is replaced by a fixed tolerance, or by the
rounding error that is computed from the graph if that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.decision import Verdict, combine_verdicts
from onnx_ops.domain.evidence import Advice, Int8Coverage, ParityMeasurement, TreeStructure
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import AS_WRITTEN, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.answers import (
    GroupAnswers,
    are_maps,
    explain_rejection,
    join_maps,
    run_groups,
)
from onnx_ops.measure.execution import (
    ExecutionReport,
    inspect_execution,
    require_hardware,
    require_versions,
)
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.measure.row_layout import arrange_runtime
from onnx_ops.onnx_graph.compatibility import (
    check_model,
    explain_missing_operators,
    find_custom_operators,
    is_unsafe_without_rows,
)
from onnx_ops.onnx_graph.files import share_structure
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.ort_format import is_ort_format
from onnx_ops.onnx_graph.tree_ensembles import build_split_probes, has_trees, read_trees
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.output_columns import (
    WHOLE,
    ColumnNoise,
    Rounding,
    compute_ratio,
    measure_columns,
)
from onnx_ops.statistics.parity import make_mismatch, measure_output
from onnx_ops.statistics.probes import MIN_NOISE_ROWS, REAL
from onnx_ops.statistics.tree_parity import compare_trees
from onnx_ops.tools.model_inputs import find_fixed_sizes, shared_inputs
from onnx_ops.tools.sample_rows import InputGroup, SampleRows, build_groups

REFERENCE = replace(AS_WRITTEN, name="reference")

_ENOUGH = 8
"""Minimum number of rows for which equal answers to all rows are significant."""

_SHOWN = 4
"""Maximum number of groups that the note on rejected groups names."""

KEYS, LENGTH = " (keys)", " (length)"
"""Suffixes of the additional outputs that describe maps and sequences."""

JoinedAnswers = Mapping[str, Tensors | MeasurementError]
"""Joined answers by group; the error for a group that the model rejects."""

Reporter = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDifference:
    """One output on one group of inputs.

    `error` is the largest |B - A|; for `labels` (integers, booleans, texts), it is the share of
    rows that differ. `limit` is the largest allowed error at the worst value; `ratio` is error /
    limit. `mismatch` describes a difference without a number.
    """

    output: str
    group: str
    rows: int
    error: float
    limit: float
    ratio: float
    labels: bool
    mismatch: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """The comparison of B with A.

    `notes` list what was left out or not judged, the outputs that only B has, and how maps and
    sequences were compared. `trees` compares the trees of both models, if they have trees.
    `coverage` is the part of a quantized B that runs in int8. `advice` lists the causes that slow B
    down.
    """

    differences: tuple[OutputDifference, ...]
    notes: tuple[str, ...]
    trees: TreeStructure | None = None
    coverage: Int8Coverage | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of all differences."""
        return combine_verdicts(d.verdict for d in self.differences)

    @property
    def worst(self) -> OutputDifference:
        """Return the first of the worst differences."""
        return max(
            self.differences, key=lambda d: (d.verdict.rank, bool(d.mismatch), d.ratio, d.error)
        )

    @property
    def reason(self) -> str:
        """Return the reason for the worst verdict."""
        if not self.differences:
            return (
                "no answer can be compared: "
                f"{'; '.join(self.notes) or 'both models have empty answers'}"
            )
        worst = f"output {self.worst.output!r}, inputs {self.worst.group!r}: {self.worst.reason}"
        if self.verdict is not Verdict.PASS:
            return worst
        groups = f"{len({d.group for d in self.differences})} groups of inputs"
        if self.worst.error == 0:
            return f"identical answers on {groups}"
        return f"within tolerance on {groups}; nearest to its limit is {worst}"


def compare(
    runtime: Runtime,
    target: Target,
    a: Path,
    b: Path,
    samples: SampleRows,
    report: Reporter = lambda _: None,
    *,
    sizes: Collection[str] = (),
    exact: Runtime | None = None,
) -> ParityResult:
    """Compare B, run on the target, with A.

    `sizes` names dimensions of A for which one size is sufficient. If B fixes another dimension,
    the functions differ. `exact` runs A as the reference, if the target's runtime is not ONNX
    Runtime on this machine.

    Raises:
        UserError: a file is not a valid model, or the two models have different inputs. This
            error is also raised if the target lacks a model's opset, IR version or operators, or
            if an output has another shape for other rows.
        MeasurementError: the machine does not meet the target's requirements, a model fails, or A
            gives different answers to the same rows.
    """
    shared_inputs(a, b)
    require_hardware(runtime, target)
    reference = replace(REFERENCE, custom_ops=target.custom_ops)
    _require_operators(a, reference, target)
    _require_operators(b, target, target)
    groups = _make_groups(a, b, samples)

    layout = samples.read_layout(a)
    exact, runtime = arrange_runtime(exact or runtime, layout), arrange_runtime(runtime, layout)
    report(f"running {a.name} and {b.name} on {len(groups)} groups of inputs")

    inputs = {group.name: group.runs for group in groups}

    def run_candidate() -> tuple[JoinedAnswers, ExecutionReport]:
        return _join_groups(_run_groups(runtime, target, b, groups)), inspect_execution(
            runtime, a, b, target
        )

    # Each model runs in a process of the runtime, so this thread can run the reference at the same
    # time.
    with ThreadPoolExecutor(1) as pool:
        candidate = pool.submit(run_candidate)
        expected = _run_reference(exact, reference, a, groups)
        roundings = measure_roundings(exact, a, inputs, custom_ops=target.custom_ops)
        answers, examined = candidate.result()
    groups, rejected = _drop_rejected(groups, expected)
    measured, refused = _measure_groups(groups, expected, answers, roundings)
    fixed, trees, real = find_fixed_sizes(a, b), _compare_trees(a, b), _tensors(expected[REAL])
    measured += _find_structural_mismatches(fixed, sizes, trees)
    measured += _find_halved(real, _tensors(answers[REAL]))
    measured = _pool_assumed_noise(measured, groups)

    inside, outside = _judge_measurements(measured, expected)
    inside += _judge_distinction(
        samples, real, [_tensors(expected[g.name]) for g in groups if g.inside]
    )
    notes = (
        *_note_omissions(samples, refused, rejected, fixed),
        *_note_outputs(real, answers),
        *_note_outside(outside),
    )
    return ParityResult(
        differences=inside,
        notes=notes,
        trees=trees,
        coverage=examined.coverage,
        advice=examined.advice,
    )


def _require_operators(model: Path, place: Target, target: Target) -> None:
    """Check that a model can run on `place` with the custom operators of `target`.

    Raises:
        UserError: the model's opset or IR version is too new for `place`, or `target` lacks
            operators of the model.
    """
    require_versions(model, place)
    if reason := explain_missing_operators(find_custom_operators(share_structure(model)), target):
        raise UserError(
            reason, where=model.name, remedy="Declare their library in the target's `custom_ops`."
        )


def _make_groups(a: Path, b: Path, samples: SampleRows) -> tuple[InputGroup, ...]:
    """Return the groups of inputs, with rows near the splits of any trees.

    Such rows are left out if the model has inputs without rows.
    """
    with_trees = _list_tree_models(a, b)
    splits = (
        build_split_probes(with_trees[0], samples.rows)
        if with_trees and not samples.fixed
        else None
    )
    empty = not any(map(is_unsafe_without_rows, (a, b)))
    return build_groups(samples, empty=empty, bounds=read_input_bounds(a), splits=splits)


def _list_tree_models(*models: Path) -> list[Path]:
    return [path for path in models if not is_ort_format(path) and has_trees(path)]


def _compare_trees(a: Path, b: Path) -> TreeStructure | None:
    """Compare the trees of two models node by node.

    Return None unless the trees of both models can be read. Trees with splits by category cannot.
    """
    if len(_list_tree_models(a, b)) < 2:
        return None
    try:
        return compare_trees(read_trees(b), read_trees(a))
    except UserError:
        return None


def _find_structural_mismatches(
    fixed: Mapping[str, int], sizes: Collection[str], trees: TreeStructure | None
) -> list[ParityMeasurement]:
    """Return mismatches that answers do not show: sizes that B fixes, and tree nodes."""
    mismatches = []
    if fixed_sizes := [f"{name} = {size}" for name, size in fixed.items() if name not in sizes]:
        why = (
            f"B accepts only {', '.join(fixed_sizes)}, but A accepts any size; to compare only at "
            "that size, set --dim NAME=SIZE"
        )
        mismatches.append(make_mismatch("*", "sizes", why))
    if trees is not None and trees.changed:
        what = f"{trees.changed} nodes of trees differ: {trees.differences[0]}"
        mismatches.append(make_mismatch("*", "trees", what))
    return mismatches


def _drop_rejected(
    groups: Sequence[InputGroup], expected: JoinedAnswers
) -> tuple[tuple[InputGroup, ...], list[str]]:
    """Return the groups to compare, and the names of dropped groups.

    Groups of assumed inputs that A rejects are dropped.
    """
    rejected = [
        g.name for g in groups if g.assumed and isinstance(expected[g.name], MeasurementError)
    ]
    return tuple(group for group in groups if group.name not in rejected), rejected


def _note_omissions(
    samples: SampleRows, refused: Sequence[str], rejected: Sequence[str], fixed: Mapping[str, int]
) -> list[str]:
    """Return notes on inputs that were not compared."""
    return [
        *(
            ["the rows are large: derived rows and large batches were not compared"]
            if samples.large
            else []
        ),
        *refused,
        *([f"A rejects generated sizes or values: {_shorten(rejected)}"] if rejected else []),
        *(
            f"B accepts only {name} = {size}; other sizes were not compared"
            for name, size in fixed.items()
        ),
    ]


def _note_outputs(real: Tensors, answers: JoinedAnswers) -> list[str]:
    """Return notes on outputs that only B has, and on outputs that are not tensors."""
    answered = {name for answer in answers.values() for name in _tensors(answer)}
    # For an empty batch, a map without rows appears as a sequence of length 0.
    extra = sorted(
        name for name in answered.difference(real) if name.removesuffix(LENGTH) not in real
    )
    maps, sequences = (
        [n.removesuffix(end) for n in real if n.endswith(end)] for end in (KEYS, LENGTH)
    )
    return [
        *([f"B has outputs that A lacks: {', '.join(extra)}"] if extra else []),
        *(f"{name} contains maps: compared by keys, and as a matrix" for name in maps),
        *(
            f"{name} is a sequence: compared by length, and element by element"
            for name in sequences
        ),
    ]


def _note_outside(differences: Sequence[OutputDifference]) -> list[str]:
    """Return a note on differences at inputs that are unlike all supplied rows."""
    differing = [difference for difference in differences if difference.verdict is not Verdict.PASS]
    if not differing:
        return []
    names = ", ".join(sorted({d.group for d in differing}))
    reason = differing[0].reason
    return [
        (
            "not judged, since these inputs are unlike all supplied rows: "
            f"B differs on {names} ({reason})"
        )
    ]


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _run_reference(
    runtime: Runtime, target: Target, a: Path, groups: Sequence[InputGroup]
) -> JoinedAnswers:
    """Run A on all groups, and repeat its first run of the plain rows.

    All runs are in one session, since a fresh session would draw the same random numbers again.

    Raises:
        UserError: A is not a valid model, or an output has another shape for other rows.
        MeasurementError: A rejects the plain rows, or answers the repeated run differently.
    """
    first, *others = groups
    repeated = replace(first, runs=(*first.runs, first.runs[0]))
    answers = _run_groups(runtime, target, a, (repeated, *others))
    doubled = answers[first.name]
    if isinstance(doubled, MeasurementError):
        raise doubled
    *plain, again = doubled
    _require_same(a, plain[0], again)
    return _join_groups({**answers, first.name: tuple(plain)})


def _run_groups(
    runtime: Runtime, target: Target, model: Path, groups: Sequence[InputGroup]
) -> GroupAnswers:
    """Return the answers to all groups; a group that the model rejects has the error.

    Raises:
        UserError: the file is not a valid model.
        MeasurementError: the model rejects the plain rows.
    """
    try:
        return run_groups(runtime, target, model, {group.name: group.runs for group in groups})
    except MeasurementError:
        check_model(model)  # For an invalid file, this call raises a UserError instead.
        raise


def _join_groups(answers: GroupAnswers) -> JoinedAnswers:
    return {
        name: a if isinstance(a, MeasurementError) else _join_runs(a) for name, a in answers.items()
    }


def _as_tensors(answer: Mapping[str, Any]) -> Tensors:
    """Return answers with sequences and maps converted to tensors.

    Maps (ZipMap) become a matrix with a column for each key, and an output with their keys. Other
    sequences become one output for each element, and an output with their length. An optional
    output that is absent is omitted.
    """
    tensors: dict[str, Any] = {}
    for name, value in answer.items():
        maps = [value] if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(maps, list):
            tensors[name] = np.asarray(value)
        elif are_maps(maps):
            tensors[name], tensors[f"{name}{KEYS}"] = join_maps(maps)
        else:
            tensors[f"{name}{LENGTH}"] = np.array([len(maps)])
            tensors |= {
                f"{name}[{index}]": np.asarray(element) for index, element in enumerate(maps)
            }
    return tensors


def _join_runs(raw: Sequence[Mapping[str, Any]]) -> Tensors:
    answers = [_as_tensors(answer) for answer in raw]
    if len(answers) == 1:
        return answers[0]
    parts: dict[str, list[Any]] = {}  # A sequence may be longer in one run than in another.
    for answer in answers:
        for name, array in answer.items():
            parts.setdefault(name, []).append(np.atleast_1d(array))
    for name, arrays in parts.items():
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            raise UserError(
                f"output {name!r} has another shape for other rows: "
                f"{' and '.join(map(str, sorted(shapes)[:2]))}",
                why="its shape depends on the values of the inputs, so answers cannot be compared",
                remedy="`onnx-ops judge A B --only latency` judges the time of these models.",
            )
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _require_same(a: Path, one: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    first, second = _as_tensors(one), _as_tensors(again)
    for name, array in first.items():
        if name not in second or not _same(array, second[name]):
            raise MeasurementError(
                f"output {name!r} differs between runs",
                where=a.name,
                why="the model draws random numbers, or one of its kernels is not deterministic",
                remedy="Export it for inference, without dropout and sampling.",
            )


def _same(first: Any, second: Any) -> bool:
    return bool(np.array_equal(first, second, equal_nan=first.dtype.kind == "f"))


def _tensors(answer: Tensors | MeasurementError) -> Tensors:
    return {} if isinstance(answer, MeasurementError) else answer


def _measure_groups(
    groups: Sequence[InputGroup],
    expected: JoinedAnswers,
    answers: JoinedAnswers,
    roundings: Mapping[str, Mapping[str, Rounding]],
) -> tuple[list[ParityMeasurement], list[str]]:
    """Return B's differences on each group, and notes on the groups that A rejects."""
    measured, notes = [], []
    real = roundings.get(REAL, {})
    known: dict[str, ColumnNoise | None] = {
        name: measure_columns(array, array, real.get(name, WHOLE))
        for name, array in _tensors(expected[REAL]).items()
    }
    for group in groups:
        reference, answer = expected[group.name], answers[group.name]
        if isinstance(reference, MeasurementError):
            notes.append(
                f"inputs {group.name!r} were omitted: "
                f"A rejects them ({explain_rejection(reference)})"
            )
            continue
        if isinstance(answer, MeasurementError):
            text = f"B rejects these inputs, but A does not: {explain_rejection(answer)}"
            measured.append(replace(make_mismatch("*", group.name, text), inside=group.inside))
            continue
        entries = _measure_outputs(
            group.name, reference, answer, roundings.get(group.name, {}), known
        )
        measured += (replace(entry, inside=group.inside) for entry in entries)
    return measured, notes


def _measure_outputs(
    group: str,
    reference: Tensors,
    answer: Tensors,
    roundings: Mapping[str, Rounding],
    known: Mapping[str, ColumnNoise | None],
) -> Iterator[ParityMeasurement]:
    """Yield the differences of B's outputs from A's; also for outputs that B lacks."""
    for name, array in reference.items():
        if name in answer:
            yield measure_output(
                group=group,
                output=name,
                onnx=answer[name],
                single=array,
                double=None,
                rounding=roundings.get(name, WHOLE),
                known=known.get(name) if array.ndim and len(array) < MIN_NOISE_ROWS else None,
            )
        elif not _has_counterpart(name, array, answer):
            yield make_mismatch(name, group, "B lacks this output")


def _has_counterpart(name: str, array: Any, answer: Tensors) -> bool:
    """Return whether an output that B lacks has another form in B.

    If one model returns a matrix and the other maps, keys and lengths have no counterpart of the
    same name.
    """
    base = name.removesuffix(KEYS).removesuffix(LENGTH)
    if base != name:
        return base in answer
    return not array.size and f"{name}{LENGTH}" in answer


def _pool_assumed_noise(
    measured: Sequence[ParityMeasurement], groups: Sequence[InputGroup]
) -> list[ParityMeasurement]:
    """Use the plain rows' tolerance for assumed groups, if it is larger.

    Such a group has few rows: all of its answers may be tiny because terms cancel.
    """
    assumed = [group.name for group in groups if group.assumed]
    plain = {m.output: m.noise for m in measured if m.group == REAL}
    return [
        replace(m, noise=noise, ratio=compute_ratio(m.error, noise))
        if m.group in assumed and (noise := plain.get(m.output, 0.0)) > m.noise
        else m
        for m in measured
    ]


def _find_halved(expected: Tensors, answers: Tensors) -> list[ParityMeasurement]:
    """Return a mismatch for each output whose values are float16 numbers only in B.

    The error of rounding to float16 can be too small to exceed the tolerance for float32.
    """

    def halved(array: Any) -> bool:
        with np.errstate(over="ignore"):
            return bool((array.astype(np.float16).astype(np.float32) == array).all())

    both = [(name, a, answers[name]) for name, a in expected.items() if name in answers]
    return [
        make_mismatch(name, REAL, "B's answers are float16 numbers, but A's are not")
        for name, a, b in both
        if a.dtype.name == b.dtype.name == "float32" and a.size and halved(b) and not halved(a)
    ]


def _judge_measurements(
    measured: Sequence[ParityMeasurement], expected: JoinedAnswers
) -> tuple[tuple[OutputDifference, ...], tuple[OutputDifference, ...]]:
    """Judge each measurement, in the order of A's outputs.

    Return the differences at inputs that callers can send, and the other differences.
    """
    labels = _find_labels(expected)
    places = {name: place for place, name in enumerate(("*", *_tensors(expected[REAL])))}
    ordered = sorted(measured, key=lambda m: places.get(m.output, len(places)))
    judged = [(m.inside, _judge_measurement(m, labels=m.output in labels)) for m in ordered]
    inside = tuple(difference for is_inside, difference in judged if is_inside)
    return inside, tuple(difference for is_inside, difference in judged if not is_inside)


def _find_labels(expected: JoinedAnswers) -> set[str]:
    """Return the outputs that contain other values than floats in any group."""
    tensors = [
        (name, array) for answer in expected.values() for name, array in _tensors(answer).items()
    ]
    return {name for name, array in tensors if array.dtype.kind != "f"}


def _judge_distinction(
    samples: SampleRows, real: Tensors, groups: Sequence[Tensors]
) -> tuple[OutputDifference, ...]:
    """Return an INCONCLUSIVE difference if A's answers are the same for all rows.

    The answers within each group are compared. Fewer than `_ENOUGH` rows are not checked.
    """
    count = len(samples)
    outputs = _list_model_outputs(real)
    if count < _ENOUGH or not all(array.ndim and len(array) == count for array in outputs):
        return ()
    by_row = [array for answers in groups for array in _list_model_outputs(answers) if array.ndim]
    if not all(_same(array, array[:1].repeat(len(array), 0)) for array in by_row):
        return ()
    reason = (
        f"A gives the same answer to all {count} rows, so they are not conclusive; "
        "use rows with different answers"
    )
    blank = _judge_measurement(replace(make_mismatch("*", REAL, reason), rows=count), labels=False)
    return (replace(blank, mismatch="", verdict=Verdict.INCONCLUSIVE),)


def _list_model_outputs(answers: Tensors) -> list[Any]:
    """Return the values of the model's outputs, without keys and lengths."""
    return [array for name, array in answers.items() if not name.endswith((KEYS, LENGTH))]


def _judge_measurement(m: ParityMeasurement, *, labels: bool) -> OutputDifference:
    factor = ParityGate().noise_factor
    limit = m.noise * factor
    good = not m.mismatch and m.ratio <= factor
    if m.mismatch:
        reason = m.mismatch.replace("the source gives", "A gives").replace(
            "the source has", "A has"
        )
    elif labels:
        reason = f"answers differ in {100 * m.error:.3g}% of {_format_rows(m)}, limit 0%"
    else:
        place = f"{m.column}: " if m.column else ""
        reason = (
            f"{place}error {m.error:.3g}, limit {limit:.3g}, "
            f"largest answer {m.scale:.3g}, {_format_rows(m)}"
        )
    return OutputDifference(
        output=m.output,
        group=m.group,
        rows=m.rows,
        error=m.error,
        limit=limit,
        ratio=m.ratio / factor,
        labels=labels,
        mismatch=m.mismatch,
        verdict=Verdict.PASS if good else Verdict.FAIL,
        reason=reason,
    )


def _format_rows(m: ParityMeasurement) -> str:
    return "1 row" if m.rows == 1 else f"{m.rows} rows"
