"""Run a project's own code and its deployment on raw inputs; compare their steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.system_comparison import MODEL_STEP, Tolerances
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, OnnxOpsError, UserError
from onnx_ops.measure.step_copies import adapt_value, copy_value, read_array
from onnx_ops.measure.system_inputs import RawInput
from onnx_ops.measure.user_functions import call_function
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime
from onnx_ops.statistics.step_differences import explain_answers, explain_difference, is_small
from onnx_ops.statistics.step_values import (
    Form,
    StepDistance,
    differs_in_answer,
    measure_step,
    rate_distance,
)
from onnx_ops.step_recorder import recording_steps

INPUT, OUTPUT = "input", MODEL_STEP
"""Names under which the source records the input and the output of the model."""
_CHUNK = 16
"""Number of inputs whose values are in memory at the same time."""
_REPEATED = 3
"""Number of inputs on which the source runs a second time, without a recording."""
_TYPES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStep:
    """One step of the deployed system: a function of the project, or an ONNX graph.

    `reference` is the reference of the function, or the name of the file.
    """

    name: str
    reference: str
    function: Callable[..., Any] | None = None
    graph: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The project's own code, and the steps and the model that are to be deployed."""

    predict: Callable[..., Any]
    reference: str
    candidate: Path
    before: tuple[SystemStep, ...] = ()
    after: tuple[SystemStep, ...] = ()

    @property
    def steps(self) -> tuple[SystemStep, ...]:
        """Return all steps in order, with the model as the step `output`."""
        model = SystemStep(name=OUTPUT, reference=self.candidate.name, graph=self.candidate)
        return (*self.before, model, *self.after)


@dataclass(slots=True, kw_only=True)
class WorstCase:
    """The values of the input with the largest difference at one step.

    `ratio` is the difference divided by its limit. `source` is the source's value before the step.
    """

    name: str
    ratio: float
    reference: Any
    value: Any
    source: Any = None


@dataclass(slots=True, kw_only=True)
class StepMeasurement:
    """The differences at one step.

    `missing` counts inputs for which the source did not record the step. `skipped` counts inputs
    for which the step could not run after an earlier difference. `pairs` are the small values of
    source and candidate.
    """

    name: str
    reference: str
    distances: list[tuple[str, Form, StepDistance]] = field(default_factory=list)
    missing: int = 0
    skipped: int = 0
    worst: WorstCase | None = None
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def span(self) -> float:
        """Return the largest range of the source's signal in one input."""
        return max((distance.span for _, _, distance in self.distances), default=0.0)

    def explain(self) -> str:
        """Return the likely cause of the difference; empty if unclear."""
        if found := explain_answers(self.pairs):
            return found
        if self.worst is None:
            return ""
        return explain_difference(self.worst.reference, self.worst.value, self.worst.source)


@dataclass(slots=True, kw_only=True)
class SystemMeasurement:
    """The differences of two systems: by step, and of their final answers.

    `differing` names inputs whose final answers differ; `final` has the values of the first with an
    answer. `undeclared` names steps that only the source has, and `repeated` steps that the source
    recorded more than once. `unstable` names an input that the source answers differently in a
    second run. `first` has the source's first final answer, and `varies` shows whether a later one
    differs from it.
    """

    steps: tuple[StepMeasurement, ...]
    inputs: int = 0
    first: tuple[Any, ...] = ()
    varies: bool = False
    differing: list[str] = field(default_factory=list)
    final: WorstCase | None = None
    undeclared: dict[str, None] = field(default_factory=dict)
    repeated: dict[str, None] = field(default_factory=dict)
    unstable: str = ""


@dataclass(slots=True, kw_only=True)
class _Flow:
    """The values of one raw input between two steps of the candidate.

    `own` is the value after the candidate's own steps. `fed` is what its next step gets: the
    source's value if it was recorded and fits, otherwise the candidate's. `before` is the value
    that the source recorded last. `form` is the kind of difference that `fed` can have from the
    source's value; None for the raw input. `differs`: an earlier step was outside its tolerance.
    `broken`: a later step then failed.
    """

    raw: RawInput
    recorded: dict[str, Any]
    answer: Any
    own: Any
    fed: Any
    before: Any = None
    form: Form | None = None
    broken: bool = False
    differs: bool = False


def measure_system(
    system: System,
    inputs: Sequence[RawInput],
    runtime: Runtime,
    target: Target,
    tolerances: Tolerances,
    report: Callable[[str], None] = lambda _: None,
) -> SystemMeasurement:
    """Run both systems on raw inputs, and measure the differences at each step.

    Each step of the candidate gets the source's value of the step before, if it was recorded and
    fits. The differences of several steps then do not add up. The final answers are those of the
    candidate's steps alone.

    Raises:
        UserError: the source raises an error, or a step of the candidate does so without an earlier
            difference. The same error is raised if the model is the first declared step, and the
            source does not record its input.
        MeasurementError: a graph failed in the runtime without an earlier difference.
        StageError: the source or a step fails because of the machine.
    """
    steps = system.steps
    measured = SystemMeasurement(
        steps=tuple(StepMeasurement(name=step.name, reference=step.reference) for step in steps)
    )
    for start in range(0, len(inputs), _CHUNK):
        chunk = inputs[start : start + _CHUNK]
        report(f"{target.name}: inputs {start + 1} to {start + len(chunk)} of {len(inputs)}")
        flows = [_run_source(system, raw, measured, start + i) for i, raw in enumerate(chunk)]
        for index, step in enumerate(steps):
            runner = _Runner(step, runtime, target)
            is_last = index == len(steps) - 1
            _run_step(runner, flows, measured.steps[index], system, tolerances, is_last=is_last)
        _compare_answers(flows, measured)
        measured.inputs += len(chunk)
    return measured


def _run_source(system: System, raw: RawInput, measured: SystemMeasurement, index: int) -> _Flow:
    """Run the project's own code on one input, and record its steps."""
    answer: Any
    with _quiet_output(), recording_steps(copy_value) as recording:
        answer = call_function(system.predict, system.reference, raw.value, on=raw.name)
    answer = copy_value(answer)
    if index < _REPEATED and not measured.unstable:
        with _quiet_output():
            again = call_function(system.predict, system.reference, raw.value, on=raw.name)
        if _is_different(answer, again):
            measured.unstable = raw.name
    known = {step.name for step in system.steps} | {INPUT}
    measured.undeclared |= dict.fromkeys(name for name in recording.values if name not in known)
    measured.repeated |= recording.repeated
    if system.before:
        return _Flow(
            raw=raw, recorded=recording.values, answer=answer, own=raw.value, fed=raw.value
        )
    if INPUT not in recording.values:
        raise UserError(
            f"{system.reference} recorded no step {INPUT!r}",
            where=raw.name,
            why="no step before the model is declared, so the model gets the source's input",
            remedy="Mark it in the source: onnx_ops.record_step('input', x), or declare the steps "
            "before the model.",
        )
    value = recording.values[INPUT]
    return _Flow(
        raw=raw,
        recorded=recording.values,
        answer=answer,
        own=value,
        fed=value,
        before=read_array(value),
        form="same",
    )


def _is_different(answer: Any, again: Any) -> bool:
    distance = measure_step(read_array(answer), read_array(again))
    return bool(distance.mismatch or distance.changed or distance.error > 1e-5)


@contextlib.contextmanager
def _quiet_output() -> Iterator[None]:
    """Redirect the standard output of the project's code to standard error.

    Standard output is for the documents of onnx-ops.
    """
    with contextlib.redirect_stdout(sys.stderr):
        yield


class _Runner:
    """Runner of one step of the candidate on several values."""

    def __init__(self, step: SystemStep, runtime: Runtime, target: Target) -> None:
        self.step, self._runtime, self._target = step, runtime, target

    def run(self, values: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return the result of the step for each value.

        Raises:
            OnnxOpsError: the step failed on a value.
        """
        if self.step.function is not None:
            with _quiet_output():
                return [
                    call_function(self.step.function, self.step.reference, value, on=name)
                    for value, name in zip(values, names, strict=True)
                ]
        graph = self.step.graph
        if graph is None:
            raise UserError(f"step {self.step.name} has neither a function nor a graph")
        specs = read_model_info(graph).inputs
        feeds = tuple(
            build_feed(specs, value, where=f"{self.step.reference} on {name}")
            for value, name in zip(values, names, strict=True)
        )
        answers = self._runtime.run(graph, self._target, feeds)
        return [
            next(iter(answer.values())) if len(answer) == 1 else dict(answer) for answer in answers
        ]


def build_feed(specs: Sequence[TensorSpec], value: Any, *, where: str) -> dict[str, Any]:
    """Return the inputs of a graph from the value of the step before.

    A mapping is bound by name, a list of arrays by order. For an input of uint8, the path of a file
    is replaced by the bytes of the file.

    Raises:
        UserError: the value lacks an input, or has another number of arrays.
    """
    if isinstance(value, dict):
        missing = [spec.name for spec in specs if spec.name not in value]
        if missing:
            raise UserError(
                f"the value has no {missing[0]!r}",
                where=where,
                remedy="The previous step, or else the raw input, must be a mapping with "
                f"{', '.join(spec.name for spec in specs)}.",
            )
        return {spec.name: _build_tensor(spec, value[spec.name]) for spec in specs}
    parts = list(value) if isinstance(value, (list, tuple)) and len(specs) > 1 else [value]
    if len(parts) != len(specs):
        raise UserError(
            f"the graph takes {len(specs)} inputs, and gets {len(parts)}",
            where=where,
            remedy="The previous step, or else the raw input, must be a mapping from the names of "
            "the inputs to arrays.",
        )
    return {spec.name: _build_tensor(spec, part) for spec, part in zip(specs, parts, strict=True)}


def _build_tensor(spec: TensorSpec, value: Any) -> Any:
    """Return a value as an input's tensor, with a batch axis if an axis is missing.

    Numbers get the type of the input, but floats and other numbers are not converted to each other.
    """
    if spec.dtype == "uint8" and isinstance(value, str) and Path(value).is_file():
        value = np.frombuffer(Path(value).read_bytes(), dtype=np.uint8)
    array = np.asarray(read_array(value))
    if spec.dtype == "string":
        array = array.astype(object)
    elif array.dtype.kind in "biuf":
        wanted = np.dtype(_TYPES.get(spec.dtype, spec.dtype)) if spec.dtype != "bfloat16" else None
        # A float in place of an integer or boolean, or the reverse, is a difference between the
        # systems, and must be reported.
        if wanted is not None and (wanted.kind == "f") == (array.dtype.kind == "f"):
            array = array.astype(wanted)
    return array[None] if array.ndim == len(spec.shape) - 1 else array


def _run_step(
    runner: _Runner,
    flows: Sequence[_Flow],
    measured: StepMeasurement,
    system: System,
    tolerances: Tolerances,
    *,
    is_last: bool,
) -> None:
    """Run one step on every input, compare its values, and set the next step's inputs."""
    is_before = runner.step in system.before
    alive = [flow for flow in flows if not flow.broken]
    measured.skipped += len(flows) - len(alive)
    own_values = _run_each(runner, alive, [flow.own for flow in alive], tolerate=False)
    fed_values = list(own_values)
    apart = [i for i, flow in enumerate(alive) if flow.fed is not flow.own]
    again = _run_each(
        runner, [alive[i] for i in apart], [alive[i].fed for i in apart], tolerate=True
    )
    for i, made in zip(apart, again, strict=True):
        fed_values[i] = own_values[i] if made is _FAILED else made
    for flow, own, fed in zip(alive, own_values, fed_values, strict=True):
        if own is _FAILED:
            flow.broken = True
            measured.skipped += 1
            continue
        reference, is_known = _find_reference(flow, runner.step.name, system, is_last=is_last)
        flow.own = own
        if not is_known:
            measured.missing += 1
            flow.fed = fed
            flow.form = _widen(flow.form, _find_form(flow, fed, is_before=is_before))
            continue
        form = _widen(flow.form, _find_form(flow, fed, is_before=is_before))
        _compare_step(flow, fed, reference, form, measured, tolerances)


_FAILED = object()
"""Placeholder for the result of a step that failed."""


def _run_each(
    runner: _Runner, flows: Sequence[_Flow], values: Sequence[Any], *, tolerate: bool
) -> list[Any]:
    """Return the results of a step, and `_FAILED` for each input on which it failed.

    A failure is raised unless an earlier difference explains it, or failures are tolerated. A
    StageError of a single input is raised in any case.

    Args:
        tolerate: whether failures are tolerated, because the step got the source's values.
    """
    if not flows:
        return []
    names = [flow.raw.name for flow in flows]
    try:
        return runner.run(values, names)
    except OnnxOpsError:
        results = []
        for flow, value, name in zip(flows, values, names, strict=True):
            try:
                results += runner.run([value], [name])
            except (UserError, MeasurementError):
                if not tolerate and not flow.differs:
                    raise
                results.append(_FAILED)
        return results


def _find_reference(flow: _Flow, name: str, system: System, *, is_last: bool) -> tuple[Any, bool]:
    """Return the source's value of a step, and whether there is one.

    The last step before the model can be recorded as `input`. The value of the last step is the
    answer, if it was not recorded.
    """
    if name in flow.recorded:
        return flow.recorded[name], True
    if system.before and name == system.before[-1].name and INPUT in flow.recorded:
        return flow.recorded[INPUT], True
    return (flow.answer, True) if is_last else (None, False)


def _compare_step(
    flow: _Flow,
    fed: Any,
    reference: Any,
    form: Form,
    measured: StepMeasurement,
    tolerances: Tolerances,
) -> None:
    """Measure the difference at one step, and set the value for the next step."""
    expected, given = read_array(reference), read_array(fed)
    distance = measure_step(expected, given)
    measured.distances.append((flow.raw.name, form, distance))
    span = max(measured.span, distance.span)
    ratio = rate_distance(distance, form, span, tolerances, measured.name).ratio
    if measured.worst is None or ratio > measured.worst.ratio:
        measured.worst = WorstCase(
            name=flow.raw.name, ratio=ratio, reference=expected, value=given, source=flow.before
        )
    if is_small(expected) and is_small(given):
        measured.pairs.append((expected, given))
    flow.differs = flow.differs or ratio > 1
    adapted = adapt_value(reference, flow.own)
    flow.fed = flow.own if adapted is None else adapted
    flow.form = form if adapted is None else "same"
    flow.before = expected


_ORDER: tuple[Form, ...] = ("same", "resampled", "decoded")


def _widen(a: Form | None, b: Form) -> Form:
    """Return the form with the wider tolerance."""
    return b if a is None else max(a, b, key=_ORDER.index)


def _find_form(flow: _Flow, value: Any, *, is_before: bool) -> Form:
    """Return how a step makes its value from the value that it gets.

    Only steps before the model interpolate. The tolerance of other steps is that of rounding.
    """
    if flow.form is None:
        return flow.raw.form
    if not is_before:
        return "same"
    given, made = read_array(flow.fed), read_array(value)
    if not isinstance(given, np.ndarray) or not isinstance(made, np.ndarray):
        return "same"
    return "same" if given.size == made.size else "resampled"


def _compare_answers(flows: Sequence[_Flow], measured: SystemMeasurement) -> None:
    """Compare the source's answers with those of the candidate's steps alone.

    Without a step after the model, the source's recorded model output is its answer.
    """
    if measured.steps[-1].name == OUTPUT and OUTPUT in flows[0].recorded:
        finals = [(flow, flow.recorded.get(OUTPUT)) for flow in flows]
    else:
        finals = [(flow, flow.answer) for flow in flows]
    for flow, answer in finals:
        expected, given = read_array(answer), read_array(flow.own)
        measured.first = measured.first or (expected,)
        measured.varies = measured.varies or differs_in_answer(measured.first[0], expected, 0.0)
        if flow.broken or differs_in_answer(expected, given):
            measured.differing.append(flow.raw.name)
            if measured.final is None and not flow.broken:
                measured.final = WorstCase(
                    name=flow.raw.name, ratio=np.inf, reference=expected, value=given
                )
