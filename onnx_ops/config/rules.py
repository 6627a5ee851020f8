"""What must hold between the parts of one pipeline file. Each rule looks at a draft and yields findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from onnx_ops.config.document import Finding, Loc
from onnx_ops.config.draft import Draft
from onnx_ops.config.gates import gate_findings
from onnx_ops.config.metrics import label_findings, metric_findings
from onnx_ops.config.rollouts import rollout_findings, staging_findings
from onnx_ops.config.searches import preference_findings, search_findings
from onnx_ops.config.words import did_you_mean, listing, shorten
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.quantization import find_type_conflict

Rule = Callable[[Draft], Iterator[Finding]]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def file_findings(draft: Draft) -> list[Finding]:
    """The findings of every rule of this module."""
    return [finding for rule in RULES for finding in rule(draft)]


def _origin(draft: Draft) -> Iterator[Finding]:
    if {"train", "model"} <= draft.keys:
        yield Finding(loc=("model",), message="'train' and 'model' exclude each other; keep one", on_key=True)
    elif not {"train", "model"} & draft.keys:
        message = "needs 'train' (how the model is made) or 'model' (the path of a trained one)"
        yield Finding(loc=("train",), message=message, on_key=True)


def _data_sets(draft: Draft) -> Iterator[Finding]:
    used: list[tuple[Loc, str]] = []
    if draft.validate:
        used.append((("validate", "samples", "data"), draft.validate.samples.data))
    used += [((*loc, "calibrate", "data"), entry.calibrate.data) for loc, entry in draft.quantize if entry.calibrate]
    used += [((*loc, "tune", "data"), entry.tune.data) for loc, entry in draft.quantize if entry.tune]
    for loc, name in used:
        if name not in draft.sets:
            known = f"; data has {listing(sorted(draft.sets))}" if draft.sets else "; declare it under 'data'"
            yield Finding(loc=loc, message=f"no data set is called '{name}'{did_you_mean(name, draft.sets) or known}")


def _inputs(draft: Draft) -> Iterator[Finding]:
    """`inputs:` names what the model takes, and says nothing that contradicts itself."""
    scored = draft.data.get(draft.validate.samples.data) if draft.validate else None
    known = () if scored is None else tuple(scored.inputs)  # none: the columns of the data tell
    for name, values in draft.inputs.items():
        if known and name not in known:
            hint = did_you_mean(name, known) or f"; the data set has {listing(sorted(known))}"
            yield Finding(loc=("inputs", name), message=f"the model has no input '{name}'{hint}", on_key=True)
        if values.values is not None and not (values.min is None and values.max is None):
            message = "'values' lists all that callers send; leave out 'min' and 'max'"
            yield Finding(loc=("inputs", name, "values"), message=message, on_key=True)
        if values.min is not None and values.max is not None and values.min > values.max:
            yield Finding(loc=("inputs", name, "min"), message=f"{values.min:g} is above max, which is {values.max:g}")


def _calibration(draft: Draft) -> Iterator[Finding]:
    scored = draft.validate.samples.data if draft.validate else None
    for loc, entry in draft.quantize:
        if entry.calibrate is None:
            if entry.method == "static":
                message = "static quantization needs 'calibrate', e.g. calibrate: {data: train, samples: 256}"
                yield Finding(loc=(*loc, "calibrate"), message=message, on_key=True)
            continue
        name = entry.calibrate.data
        if scored is not None and name in draft.sets and (name == scored or _same_rows(draft, name, scored)):
            message = f"'{name}' is the set that validate.samples scores; calibrate on another one"
            yield Finding(loc=(*loc, "calibrate", "data"), message=message)


def _recipes(draft: Draft) -> Iterator[Finding]:
    for loc, entry in draft.quantize:
        if problem := find_type_conflict(entry.options):
            yield Finding(loc=(*loc, "options"), message=problem)
        if entry.options.get("algorithm") == "gptq" and entry.calibrate is None:
            message = "gptq needs 'calibrate', e.g. calibrate: {data: train, samples: 256}"
            yield Finding(loc=(*loc, "calibrate"), message=message, on_key=True)


def _same_rows(draft: Draft, one: str, other: str) -> bool:
    return one in draft.data and other in draft.data and draft.data[one] == draft.data[other]


def _variants(draft: Draft) -> Iterator[Finding]:
    named = (((*loc, "name"), name) for loc, entry in draft.quantize for name in entry.variants())
    yield from _unique(named, "variant")
    for loc, entry in draft.quantize:
        if entry.name == EXPORT:
            message = f"'{EXPORT}' is the name of the export itself; choose another"
            yield Finding(loc=(*loc, "name"), message=message)


def _benchmark(draft: Draft) -> Iterator[Finding]:
    if draft.benchmark:
        targets = enumerate(draft.benchmark.targets)
        yield from _unique(((("benchmark", "targets", index), name) for index, name in targets), "target")


def _gates(draft: Draft) -> Iterator[Finding]:
    return gate_findings(draft.gates)


def _registration(draft: Draft) -> Iterator[Finding]:
    if "deploy" in draft.keys and draft.deploy and "register" not in draft.keys:
        yield Finding(loc=("deploy",), message="only registered versions are deployed; add a 'register' section")
    if draft.register and not _MODEL_NAME.fullmatch(draft.register.model):
        message = f"'{shorten(draft.register.model)}' is no name of a registered model, which stands in addresses"
        hint = re.sub(r"[^A-Za-z0-9._-]+", "-", draft.register.model).strip("-._")
        remedy = f": write '{hint}'" if hint else ""
        allowed = "use letters, digits, '.', '_' and '-', beginning with a letter or digit"
        yield Finding(loc=("register", "model"), message=f"{message}; {allowed}{remedy}")


def _endpoints(draft: Draft) -> Iterator[Finding]:
    yield from _unique((((*loc, "endpoint"), entry.endpoint) for loc, entry in draft.deploy), "endpoint")
    for loc, entry in draft.deploy:
        if draft.benchmark and entry.target not in draft.benchmark.targets:
            hint = did_you_mean(entry.target, draft.benchmark.targets) or "; add it there, so that it is measured"
            yield Finding(loc=(*loc, "target"), message=f"target '{entry.target}' is not among benchmark.targets{hint}")


def _unique(names: Iterable[tuple[Loc, str]], noun: str) -> Iterator[Finding]:
    seen: set[str] = set()
    for loc, name in names:
        if name in seen:
            yield Finding(loc=loc, message=f"{noun} '{name}' is named twice")
        seen.add(name)


RULES: tuple[Rule, ...] = (
    _origin,
    _data_sets,
    _inputs,
    _calibration,
    _recipes,
    search_findings,
    preference_findings,
    _variants,
    _benchmark,
    _gates,
    metric_findings,
    label_findings,
    _registration,
    _endpoints,
    rollout_findings,
    staging_findings,
)
