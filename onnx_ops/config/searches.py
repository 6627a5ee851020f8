"""What must hold of searches for variants, and of what is preferred among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx_ops.config.document import Finding, Loc
from onnx_ops.config.draft import Draft
from onnx_ops.config.metrics import metric_gates
from onnx_ops.config.targets import FOLDER
from onnx_ops.config.words import did_you_mean, listing
from onnx_ops.domain.gate import ACCURACY
from onnx_ops.domain.pipeline import DataSection, Quantize, SklearnData
from onnx_ops.domain.quantization import AUTO, ROLES
from onnx_ops.domain.target import Target


def search_findings(draft: Draft) -> Iterator[Finding]:
    for loc, entry in draft.quantize:
        if entry.method == AUTO:
            yield from _search(draft, loc, entry)
        else:
            given = {"tune": entry.tune, "budget": entry.budget, "keep": entry.keep != ROLES}
            for key in (key for key, value in given.items() if value):
                message = f"'{key}' is for method: auto, which searches; {entry.method} does as it is told"
                yield Finding(loc=(*loc, key), message=message, on_key=True)


def _search(draft: Draft, loc: Loc, entry: Quantize) -> Iterator[Finding]:
    for key, value in (("exclude", entry.exclude), ("options", entry.options)):
        if value:
            message = f"method: auto finds its own '{key}'; leave it out, or name a method"
            yield Finding(loc=(*loc, key), message=message, on_key=True)
    if entry.env is not None:
        message = "method: auto tries what is installed here; leave 'env' out, or name a method"
        yield Finding(loc=(*loc, "env"), message=message, on_key=True)
    if entry.tune is None:
        message = "method: auto needs 'tune', the rows that it decides by, e.g. tune: {data: tune}"
        yield Finding(loc=(*loc, "tune"), message=message, on_key=True)
        return
    name, scored = entry.tune.data, draft.validate.samples.data if draft.validate else None
    if scored is not None and name in draft.sets and _overlap(draft, name, scored):
        message = f"'{name}' shares rows with '{scored}', which validate.samples scores; tune on rows of their own"
        yield Finding(loc=(*loc, "tune", "data"), message=message)
    section = draft.data.get(name)
    gate = next((gate for _, gate in metric_gates(draft)), None)
    definition = gate.definition() if gate else ACCURACY
    if section is not None and section.label is None and not definition.label_free:
        message = f"the search decides by {definition.label}, which needs labels, but '{name}' names no 'label'"
        yield Finding(loc=(*loc, "tune", "data"), message=message)


def _overlap(draft: Draft, one: str, other: str) -> bool:
    """Whether two data sets are the same, or surely share rows."""
    if one == other:
        return True
    return one in draft.data and other in draft.data and _same_rows(draft.data[one], draft.data[other])


def _same_rows(one: DataSection, other: DataSection) -> bool:
    if isinstance(one, SklearnData) and isinstance(other, SklearnData) and one.sklearn == other.sklearn:
        sides = {one.split, other.split}
        return sides != {"train", "test"} or (one.seed, one.test_size) != (other.seed, other.test_size)
    return one == other


def preference_findings(draft: Draft) -> Iterator[Finding]:
    """Preferences for targets that are not measured."""
    if draft.benchmark:
        for name in draft.prefer.targets:
            if name not in draft.benchmark.targets:
                hint = did_you_mean(name, draft.benchmark.targets) or f"; there are {listing(draft.benchmark.targets)}"
                message = f"target '{name}' is not among benchmark.targets{hint}"
                yield Finding(loc=("prefer", "targets", name), message=message)


def price_findings(draft: Draft, targets: Mapping[str, Target]) -> Iterator[Finding]:
    """Targets on which cost is preferred and not known."""
    for name, target in targets.items():
        if draft.prefer.on(name) == "cost" and target.price_per_hour is None:
            message = (
                f"prefer: cost needs the price of '{name}': set price_per_hour, e.g. 0.096, in {FOLDER}/{name}.yaml"
            )
            yield Finding(loc=("prefer",), message=message)
