"""Parity verdicts on correct exports of models that were not chosen for it.

Shown are the number of refused exports, and the time in which the sources answer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.truth.claims import Claim, at_most, table
from benchmarks.truth.evidence import evidence
from benchmarks.truth.sklearn_models import fitted_models
from benchmarks.truth.torch_nets import cases
from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.signature import name_outputs
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.execution import SOURCE_TIME_S
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, OnnxOpsError, UserError
from onnx_ops.measure.parity import measure_parity
from onnx_ops.measure.reference_outputs import collect_reference_outputs
from onnx_ops.ports import Exporter, ExportRequest, Tensors
from onnx_ops.statistics.rules.parity import judge_parity

TARGET = Target(name="truth")

EXPORTS = 200
QUICK_STEP = 12
"""Step between the models that a quick run tries."""

_OFF = 1e-3
_OFF_ROWS = 0.05
"""Share of real rows above which an export is wrong.

A row counts if it is off by `_OFF` times the largest answer from both the source's answer in
float32 and its answer in float64. Both are answers of the source: trees jump where their input is
rounded. A scaler in float64 can move a fifth of the rows across a split, though the export agrees
with the scaler in float32 on all of them. Kernels that round differently still move up to 4.7 % of
the rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One model, and how to export it.

    `write` raises the errors of the converter.
    """

    name: str
    exporter: Exporter
    model: object
    samples: Tensors
    write: Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one export.

    `right` is whether the export is right on real rows, independent of the verdict.
    """

    name: str
    right: bool
    verdict: Verdict
    reason: str
    advised: bool
    seconds: float


def prove(*, quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outcomes, unable = _judge_sources(QUICK_STEP if quick else 1)
    right = [outcome for outcome in outcomes if outcome.right]
    refused = [outcome for outcome in right if outcome.verdict is not Verdict.PASS]
    passed = [
        outcome for outcome in outcomes if not outcome.right and outcome.verdict is Verdict.PASS
    ]
    slow = [outcome for outcome in outcomes if outcome.seconds > SOURCE_TIME_S]
    title = (
        f"correct exports ({len(right)}; {len(outcomes) - len(right)} wrong ones, "
        f"{unable} could not be converted)"
    )
    table(title, ("refused", "why"), [(outcome.name, outcome.reason[:150]) for outcome in refused])
    table("wrong exports that pass", ("export",), [(outcome.name,) for outcome in passed])
    _print_times(outcomes)
    print(
        f"  differences that only advise: {sum(outcome.advised for outcome in right)}", flush=True
    )
    enough = quick or len(right) >= EXPORTS
    return [
        Claim(
            gate="parity",
            what="correct exports",
            bound=f"≥ {EXPORTS}",
            figure=str(len(right)),
            is_met=enough,
        ),
        at_most("parity", "correct exports refused", len(refused), len(right), 0.01),
        at_most("parity", "wrong exports that pass", len(passed), len(outcomes), 0),
        at_most(
            "parity",
            f"sources asked for more than {SOURCE_TIME_S:g} s",
            len(slow),
            len(outcomes),
            0,
        ),
    ]


def _judge_sources(step: int) -> tuple[list[Outcome], int]:
    """Export and judge every `step`-th model.

    The second value is the number of models that could not be converted.
    """
    outcomes: list[Outcome] = []
    unable = 0
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, source in enumerate(list_sources(step)):
            path = Path(folder) / f"{number}.onnx"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    # The older exporter of torch prints the graph of a failed export.
                    source.write(path)
                outcomes.append(judge_export(source, path))
            except Exception:
                # Converters raise many types of errors. Only successful exports are judged.
                unable += 1
    return outcomes, unable


def _print_times(outcomes: list[Outcome]) -> None:
    seconds = sorted(outcome.seconds for outcome in outcomes)
    print(
        f"  source asked for: median {np.median(seconds):.2f} s, longest {seconds[-1]:.1f} s",
        flush=True,
    )


def list_sources(step: int) -> Iterator[Source]:
    yield from _list_torch_sources(step)
    yield from _list_fitted_sources(step)


def _list_torch_sources(step: int) -> Iterator[Source]:
    for case in cases(step):
        exporter = TorchExporter()
        writers = {
            "dynamo": _make_dynamo_writer(exporter, case),
            "legacy": _make_legacy_writer(case),
        }
        for name, write in writers.items():
            yield Source(
                name=f"{name} {case.name}",
                exporter=exporter,
                model=case.module,
                samples=case.samples,
                write=write,
            )


def _list_fitted_sources(step: int) -> Iterator[Source]:
    exporters: Mapping[str, Exporter] = {
        "sklearn": SklearnExporter(),
        "xgboost": XgboostExporter(),
        "lightgbm": LightgbmExporter(),
    }
    for fitted in fitted_models(step):
        exporter = exporters[fitted.framework]
        samples = {"x": fitted.rows}
        yield Source(
            name=fitted.name,
            exporter=exporter,
            model=fitted.model,
            samples=samples,
            write=_make_writer(exporter, fitted.model, Export(framework=fitted.framework), samples),
        )


def _make_writer(
    exporter: Exporter, model: object, section: Export, samples: Tensors
) -> Callable[[Path], None]:
    return lambda path: exporter.export(
        model, ExportRequest(section=section, samples=samples, path=path)
    )


def _make_dynamo_writer(exporter: Exporter, case: Any) -> Callable[[Path], None]:
    """Return a writer of exports with a free length where the net does not fix it."""
    sections = Export(framework="torch", dynamic=case.dynamic), Export(framework="torch")
    free, batch_only = (
        _make_writer(exporter, case.module, section, case.samples) for section in sections
    )

    def write(path: Path) -> None:
        try:
            free(path)
        except UserError as error:
            if error.where != "export.dynamic":
                raise
            batch_only(path)

    return write


def _make_legacy_writer(case: Any) -> Callable[[Path], None]:
    """Return a writer of exports by TorchScript, with only the batch free."""

    def write(path: Path) -> None:
        rows = {name: torch.from_numpy(array[:2]) for name, array in case.samples.items()}
        with torch.no_grad():
            names = list(name_outputs(case.module(*rows.values())))
        torch.onnx.export(
            case.module,
            tuple(rows.values()),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(rows),
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in (*rows, *names)},
        )

    return write


def judge_export(source: Source, path: Path) -> Outcome:
    begun = time.perf_counter()
    reference = collect_reference_outputs(source.exporter, source.model, path, source.samples)
    seconds = time.perf_counter() - begun
    try:
        measured = measure_parity(OnnxRuntime(), path, TARGET, reference.groups)
        results = tuple(judge_parity(ParityGate(), evidence(parity=measured)))
        worst = max((r for r in results if not r.advisory), key=lambda r: r.verdict.rank)
        verdict, reason = worst.verdict, worst.reason
        advised = any(r.advisory and r.verdict is not Verdict.PASS for r in results)
    except MeasurementError as error:
        verdict, reason, advised = Verdict.FAIL, str(error), False
    right = _is_right(source, path)
    return Outcome(
        name=source.name,
        right=right,
        verdict=verdict,
        reason=reason,
        advised=advised,
        seconds=seconds,
    )


def _is_right(source: Source, path: Path) -> bool:
    """Return whether an export is right on real rows.

    At most one in twenty rows differs from the source's answers in both precisions.
    """
    references = [
        source.exporter.reference(source.model, source.samples, p) for p in ("float64", "float32")
    ]
    try:
        (answers,) = OnnxRuntime().run(path, TARGET, (source.samples,))
    except OnnxOpsError:
        return False
    names = {name for reference in references for name in reference or {}}
    if not names:
        return False
    shares = [
        _measure_wrong_share(answers.get(name), [r[name] for r in references if r])
        for name in names
    ]
    return max(shares) <= _OFF_ROWS


def _measure_wrong_share(answer: Any, references: list[Any]) -> float:
    """Return the share of rows that are off from all references."""
    wrong = np.all([_find_wrong_rows(answer, reference) for reference in references], axis=0)
    return float(wrong.mean())


def _find_wrong_rows(answer: Any, expected: Any) -> Any:
    """Return for each row whether it is off."""
    if answer is None or answer.shape != expected.shape:
        return np.ones(len(expected), bool)
    if expected.dtype.kind != "f":
        wrong = answer.astype(np.str_) != expected.astype(np.str_)
    else:
        wrong = ~np.isclose(
            answer, expected, rtol=0, atol=_OFF * float(np.nanmax(np.abs(expected))), equal_nan=True
        )
    return wrong.reshape(len(wrong), -1).any(axis=1)
