"""Rules within one pipeline file.

Each rule checks a draft of the pipeline and yields issues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops import plugins
from onnx_ops.config.binding import Binding
from onnx_ops.config.document import Document, Issue, Loc
from onnx_ops.config.messages import did_you_mean, quote_names, shorten
from onnx_ops.config.targets import check_gates
from onnx_ops.domain.decision import Objective
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.gate import (
    ACCURACY,
    Gate,
    SlicesGate,
    TaskMetricGate,
)
from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.pipeline import (
    Benchmark,
    DataSection,
    Deploy,
    Export,
    Quantize,
    Register,
    SklearnData,
    Slices,
    SystemComparison,
    Train,
    Validate,
)
from onnx_ops.domain.quantization import AUTO, ROLES, TuningData, find_type_conflict
from onnx_ops.domain.system_comparison import MODEL_STEP
from onnx_ops.domain.task_metrics import METRICS
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Optimizer

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A pipeline whose sections can be missing or partly invalid.

    A section without a default is None if it is missing or unreadable. An unreadable `validate` is
    None, too; an unreadable `objective` has its default.

    An invalid part of a section is replaced by its default; the loader drops issues that follow
    from this default.

    Attributes:
        keys: The sections of the file, readable or not.
        sets: Names of all data sets of the file.
        quantize: Entries with their locations; `gates` and `deploy` are alike.
    """

    keys: frozenset[str]
    sets: frozenset[str]
    data: Mapping[str, DataSection]
    inputs: Mapping[str, InputValues]
    train: Train | None
    model: str | None
    export: Export | None
    validate: Validate | None
    system: SystemComparison | None
    quantize: tuple[tuple[Loc, Quantize], ...]
    benchmark: Benchmark | None
    slices: Slices | None
    gates: tuple[tuple[Loc, Gate], ...]
    objective: Objective
    register: Register | None
    deploy: tuple[tuple[Loc, Deploy], ...]

    @property
    def scored(self) -> str:
        """Name of the data set that `validate.samples` scores.

        The name is empty if the section is invalid.
        """
        return self.validate.samples.data if self.validate else ""

    @property
    def used_sets(self) -> list[tuple[Loc, str]]:
        """Names and locations of the data sets for scoring, calibration and tuning."""
        names: list[tuple[Loc, str]] = (
            [(("validate", "samples", "data"), self.scored)] if self.validate else []
        )
        for key in ("calibrate", "tuning_data"):
            sections = ((loc, getattr(entry, key)) for loc, entry in self.quantize)
            names += [((*loc, key, "data"), section.data) for loc, section in sections if section]
        return names

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the benchmarked targets."""
        return self.benchmark.targets if self.benchmark else ()

    @property
    def metric_gates(self) -> tuple[tuple[Loc, TaskMetricGate], ...]:
        """The gates of task metrics with their locations."""
        return tuple((loc, gate) for loc, gate in self.gates if isinstance(gate, TaskMetricGate))

    @property
    def metric_functions(self) -> tuple[tuple[Loc, str], ...]:
        """The functions that metric gates call, by reference, with their locations."""
        return tuple(
            ((*loc, key), reference)
            for loc, gate in self.metric_gates
            for key in ("use", "decode")
            if (reference := getattr(gate, key))
        )

    @property
    def system_functions(self) -> tuple[tuple[Loc, str], ...]:
        """The functions that the section `system` calls, with their locations."""
        functions = self.system.list_functions() if self.system else []
        return tuple((("system", *loc), reference) for loc, reference in functions)


def build_draft(document: Document, binding: Binding) -> Draft:
    """Return the draft of a document that was bound as a pipeline."""
    root = document.value if isinstance(document.value, dict) else {}
    data: Any = root.get("data")

    def section(name: str) -> Any:
        return binding.objects.get((name,))

    def entries(name: str) -> tuple[tuple[Loc, Any], ...]:
        if (name,) in binding.objects:
            # The pipeline file contains a single entry in place of a list.
            return (((name,), section(name)),)
        return tuple(
            (loc, value)
            for loc, value in binding.objects.items()
            if len(loc) == 2 and loc[0] == name
        )

    return Draft(
        keys=frozenset(key for key in root if isinstance(key, str)),
        sets=frozenset(str(name) for name in data) if isinstance(data, dict) else frozenset(),
        data={str(loc[-1]): value for loc, value in entries("data")},
        inputs={str(loc[-1]): value for loc, value in entries("inputs")},
        train=section("train"),
        model=root["model"] if isinstance(root.get("model"), str) else None,
        export=section("export"),
        validate=section("validate") if "validate" in root else Validate(),
        system=section("system"),
        quantize=entries("quantize"),
        benchmark=section("benchmark"),
        slices=section("slices"),
        gates=entries("gates"),
        objective=section("objective") or Objective(),
        register=section("register"),
        deploy=entries("deploy"),
    )


def check_file(draft: Draft) -> Iterator[Issue]:
    """Yield the issues of every rule of this module."""
    for rule in (
        _check_sections,
        _check_inputs,
        _check_quantization,
        _check_searches,
        _check_metrics,
        _check_slices,
        _check_targets,
        _check_system,
    ):
        yield from rule(draft)
    yield from check_gates(draft.gates)


def _check_sections(draft: Draft) -> Iterator[Issue]:
    if {"train", "model"} <= draft.keys:
        yield Issue(("model",), "'train' and 'model' exclude each other; keep one", on_key=True)
    elif not {"train", "model"} & draft.keys:
        message = (
            "expected 'train' (how the model is trained) or 'model' (a trained model: a path, "
            "models:/NAME/VERSION, or a URL)"
        )
        yield Issue(("train",), message, on_key=True)
    if "deploy" in draft.keys and draft.deploy and "register" not in draft.keys:
        yield Issue(("deploy",), "only registered versions are deployed; add a 'register' section")
    if draft.register and not _MODEL_NAME.fullmatch(draft.register.model):
        message = (
            f"'{shorten(draft.register.model)}' cannot be a registered model's name, "
            "which is part of URLs"
        )
        suggestion = re.sub(r"[^A-Za-z0-9._-]+", "-", draft.register.model).strip("-._")
        remedy = f": write '{suggestion}'" if suggestion else ""
        allowed = "use ASCII letters, digits, '.', '_' and '-', beginning with a letter or digit"
        yield Issue(("register", "model"), f"{message}; {allowed}{remedy}")


def _check_inputs(draft: Draft) -> Iterator[Issue]:
    for loc, name in draft.used_sets:
        if name not in draft.sets:
            known = (
                f"; data has {quote_names(sorted(draft.sets))}"
                if draft.sets
                else "; declare it under 'data'"
            )
            default = (
                ""
                if loc[0] in draft.keys
                else ", which `validate: {samples: {data: test}}` names by default"
            )
            yield Issue(
                loc,
                f"no data set is called '{name}'{default}{did_you_mean(name, draft.sets) or known}",
            )
    scored = draft.data.get(draft.scored)
    # Without declared inputs, the columns of the data are the inputs. Their names are unknown here
    # and thus not checked.
    columns = () if scored is None else tuple(scored.inputs)
    for name, values in draft.inputs.items():
        loc = ("inputs", name)
        if columns and name not in columns:
            hint = (
                did_you_mean(name, columns) or f"; the data set has {quote_names(sorted(columns))}"
            )
            yield Issue(loc, f"the model has no input '{name}'{hint}", on_key=True)
        yield from _check_values(loc, values)


def _check_values(loc: Loc, values: InputValues) -> Iterator[Issue]:
    if values.values is not None and not (values.min is None and values.max is None):
        message = "'values' lists everything that callers send; leave out 'min' and 'max'"
        yield Issue((*loc, "values"), message, on_key=True)
    if values.min is not None and values.max is not None and values.min > values.max:
        yield Issue((*loc, "min"), f"min ({values.min:g}) is greater than max ({values.max:g})")


def _check_quantization(draft: Draft) -> Iterator[Issue]:
    variants = (
        ((*loc, "name"), name) for loc, entry in draft.quantize for name in entry.variant_names()
    )
    yield from _check_unique(variants, "variant")
    for loc, entry in draft.quantize:
        if entry.name == EXPORT:
            yield Issue(
                (*loc, "name"), f"'{EXPORT}' is the name of the export itself; choose another name"
            )
        if problem := find_type_conflict(entry.options):
            yield Issue((*loc, "options"), problem)
        yield from _check_calibration(draft, (*loc, "calibrate"), entry)


def _check_calibration(draft: Draft, loc: Loc, entry: Quantize) -> Iterator[Issue]:
    optimizer = _find_optimizer(entry.method)
    if entry.calibrate is None:
        example = "e.g. calibrate: {data: train, samples: 256}"
        if optimizer is not None and optimizer.needs_calibration:
            yield Issue(
                loc, f"{entry.method} quantization needs 'calibrate', {example}", on_key=True
            )
        if entry.options.get("algorithm") == "gptq":
            yield Issue(loc, f"gptq needs 'calibrate', {example}", on_key=True)
        return
    if entry.calibrate.shards > 1 and (optimizer is None or not optimizer.reads_ranges):
        yield Issue(
            (*loc, "shards"),
            "'shards' is only for methods that calibrate on parts of the rows, such as static",
        )
    name, scored = entry.calibrate.data, draft.scored
    is_same = name == scored or (name in draft.data and draft.data[name] == draft.data.get(scored))
    if scored and name in draft.sets and is_same:
        yield Issue(
            (*loc, "data"),
            f"'{name}' has the rows that validate.samples scores; calibrate on another data set",
        )


def _find_optimizer(method: str) -> Optimizer | None:
    """Return the optimizer of a method, or None.

    The result is None for a search, and if the optimizer is not installed. Another check reports
    optimizers that are not installed.
    """
    try:
        optimizer: Optimizer = plugins.load("optimizers", method)
    except OnnxOpsError:
        return None
    return optimizer


def _check_searches(draft: Draft) -> Iterator[Issue]:
    for loc, entry in draft.quantize:
        if entry.method != AUTO:
            yield from _refuse_search_keys(loc, entry)
        else:
            yield from _refuse_recipe_keys(loc, entry)
            yield from _check_tuning_data(draft, (*loc, "tuning_data"), entry.tuning_data)


def _refuse_search_keys(loc: Loc, entry: Quantize) -> Iterator[Issue]:
    """Yield an issue for each key of a search in an entry that is a single recipe."""
    given = {
        "tuning_data": entry.tuning_data,
        "budget": entry.budget,
        "variants": entry.variants != ROLES,
    }
    for key in (key for key, value in given.items() if value):
        message = f"'{key}' is for method: auto, which searches; {entry.method} is a single recipe"
        yield Issue((*loc, key), message, on_key=True)


def _refuse_recipe_keys(loc: Loc, entry: Quantize) -> Iterator[Issue]:
    """Yield an issue for each key that is not allowed in a search."""
    for key, value in (("exclude", entry.exclude), ("options", entry.options)):
        if value:
            message = f"method: auto chooses '{key}' itself; leave it out, or name a method"
            yield Issue((*loc, key), message, on_key=True)
    if entry.env is not None:
        message = "method: auto tries the methods installed here; leave 'env' out, or name a method"
        yield Issue((*loc, "env"), message, on_key=True)


def _check_tuning_data(draft: Draft, loc: Loc, tuning: TuningData | None) -> Iterator[Issue]:
    if tuning is None:
        message = (
            "method: auto needs 'tuning_data', the rows on which it compares recipes, e.g. "
            "tuning_data: {data: tune}"
        )
        yield Issue(loc, message, on_key=True)
        return
    name, tuned = tuning.data, draft.data.get(tuning.data)
    if draft.scored and name in draft.sets and (name == draft.scored or _share_rows(draft, name)):
        message = (
            f"'{name}' shares rows with '{draft.scored}', which validate.samples scores; "
            "tune on other rows"
        )
        yield Issue((*loc, "data"), message)
    definition = draft.metric_gates[0][1].definition() if draft.metric_gates else ACCURACY
    if tuned is not None and tuned.label is None and not definition.label_free:
        message = (
            f"the search decides by {definition.label}, which needs labels, "
            f"but data set '{name}' has no 'label'"
        )
        yield Issue((*loc, "data"), message)


def _share_rows(draft: Draft, name: str) -> bool:
    """Return whether a data set shares rows with the scored data set.

    Two selections of one scikit-learn data set are assumed to share rows, unless they are the train
    and test rows of the same split. Other data sets share rows only if their sections are equal.
    """
    one, other = draft.data.get(name), draft.data.get(draft.scored)
    if (
        isinstance(one, SklearnData)
        and isinstance(other, SklearnData)
        and one.sklearn == other.sklearn
    ):
        sides = {one.split, other.split}
        return sides != {"train", "test"} or (one.seed, one.test_size) != (
            other.seed,
            other.test_size,
        )
    return one is not None and one == other


def _check_metrics(draft: Draft) -> Iterator[Issue]:
    for loc, gate in draft.metric_gates:
        definition = gate.definition()
        label = definition.name or "a custom metric"
        yield from _check_custom_metric(loc, gate, label)
        yield from _check_metric_options(loc, gate, label)
        yield from _check_metric_limits(loc, gate, label)
    scored = draft.data.get(draft.scored)
    needing = [loc for loc, gate in draft.metric_gates if not gate.definition().label_free]
    if scored is not None and scored.label is None and needing:
        yield Issue(
            needing[0],
            f"the metric gate needs labels, but data set '{draft.scored}' has no 'label'",
        )


def _check_custom_metric(loc: Loc, gate: TaskMetricGate, label: str) -> Iterator[Issue]:
    if gate.use and gate.name is not None:
        yield Issue((*loc, "use"), "'name' and 'use' exclude each other; keep one", on_key=True)
    if gate.use and gate.higher_is_better is None:
        yield Issue(loc, "a custom metric must set 'higher_is_better: true' or 'false'")
    if not gate.use and gate.higher_is_better is not None:
        message = (
            "'higher_is_better' is only for custom metrics ('use'); "
            f"the direction of {label} is fixed"
        )
        yield Issue((*loc, "higher_is_better"), message, on_key=True)
    if not gate.use and gate.per != "set":
        message = f"'per' is only for custom metrics ('use'); {label} has its own definition"
        yield Issue((*loc, "per"), message, on_key=True)


def _check_metric_options(loc: Loc, gate: TaskMetricGate, label: str) -> Iterator[Issue]:
    name = gate.definition().name
    known = METRICS[name].options if name is not None else frozenset()
    every = dict.fromkeys(option for metric in METRICS.values() for option in metric.options)
    for option in every:
        if getattr(gate, option) is not None and option not in known:
            takes = f"; it takes {quote_names(sorted(known))}" if known else ""
            yield Issue((*loc, option), f"{label} takes no '{option}'{takes}", on_key=True)
    if gate.positive is not None and gate.average not in (None, "binary"):
        message = f"'positive' is for average: binary, not {gate.average}"
        yield Issue((*loc, "positive"), message, on_key=True)


def _check_metric_limits(loc: Loc, gate: TaskMetricGate, label: str) -> Iterator[Issue]:
    if gate.use and gate.higher_is_better is None:
        return
    fitting, others = ("max_drop", "min"), ("max_increase", "max")
    if gate.lower_is_better:
        fitting, others = others, fitting
    for key in others:
        if getattr(gate, key) is not None:
            direction = "lower" if gate.lower_is_better else "higher"
            message = f"for {label}, {direction} is better; limit it by {quote_names(fitting)}"
            yield Issue((*loc, key), message, on_key=True)
    if all(getattr(gate, key) is None for key in (*fitting, *others)):
        yield Issue(loc, f"a {gate.kind} gate needs " + " or ".join(f"'{key}'" for key in fitting))
    for key in fitting if not (gate.lower_is_better or gate.use) else ():
        if (getattr(gate, key) or 0) > 1:
            yield Issue((*loc, key), f"{label} is at most 100%; lower '{key}'")


def _check_slices(draft: Draft) -> Iterator[Issue]:
    gates = [(loc, gate) for loc, gate in draft.gates if isinstance(gate, SlicesGate)]
    if gates and "slices" not in draft.keys:
        message = "a slices gate needs the section 'slices', e.g. slices: {by: [country]}"
        yield Issue(gates[0][0], message)
    if draft.slices is None:
        return
    if not gates:
        message = (
            "no gate judges the slices; add one to 'gates', e.g. "
            "{kind: slices, name: accuracy, max_drop: 5%}"
        )
        yield Issue(("slices",), message, on_key=True)
    yield from _check_unique(
        ((("slices", "by", index), name) for index, name in enumerate(draft.slices.by)), "slice"
    )


def _check_targets(draft: Draft) -> Iterator[Issue]:
    targets = ((("benchmark", "targets", index), name) for index, name in enumerate(draft.targets))
    yield from _check_unique(targets, "target")
    yield from _check_unique(
        (((*loc, "endpoint"), entry.endpoint) for loc, entry in draft.deploy), "endpoint"
    )
    if not draft.benchmark:
        return
    for name in draft.objective.targets:
        if name not in draft.targets:
            hint = did_you_mean(name, draft.targets) or f"; there are {quote_names(draft.targets)}"
            yield Issue(
                ("objective", "targets", name),
                f"target '{name}' is not among benchmark.targets{hint}",
            )
    for loc, entry in draft.deploy:
        if entry.target not in draft.targets:
            hint = (
                did_you_mean(entry.target, draft.targets)
                or "; add it there, so that it is measured"
            )
            yield Issue(
                (*loc, "target"), f"target '{entry.target}' is not among benchmark.targets{hint}"
            )


def _check_unique(names: Iterable[tuple[Loc, str]], noun: str) -> Iterator[Issue]:
    seen: set[str] = set()
    for loc, name in names:
        if name in seen:
            yield Issue(loc, f"{noun} '{name}' is named twice")
        seen.add(name)


def _check_system(draft: Draft) -> Iterator[Issue]:
    if draft.system is None:
        return
    steps = draft.system.list_steps()
    names = [step.name for _, step in steps if step.name]
    yield from _check_unique(
        ((("system", *loc, "name"), step.name) for loc, step in steps if step.name), "step"
    )
    for loc, step in steps:
        place = ("system", *loc)
        if step.name == MODEL_STEP:
            message = f"'{MODEL_STEP}' is the step of the model; choose another name"
            yield Issue((*place, "name"), message)
        if step.use and step.graph:
            yield Issue((*place, "graph"), "'use' and 'graph' exclude each other; keep one")
        if not step.use and not step.graph:
            message = (
                "a step needs 'use' (package.module:function) or 'graph' (the path of an ONNX file)"
            )
            yield Issue(place, message)
    known = [*names, MODEL_STEP]
    for name in draft.system.tolerances.steps:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {quote_names(known)}"
            yield Issue(
                ("system", "tolerances", "steps", name), f"no step is called '{name}'{hint}"
            )
