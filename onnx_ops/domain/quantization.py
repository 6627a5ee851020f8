"""The search for quantized variants under a budget, and recipes for quantization.

A recipe is for all machines of the targets, so it depends on the arithmetic of each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, doc

from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.quantities import OMIT_DEFAULT, Bytes, Count, Fraction, Json, Seconds

AUTO = "auto"
"""The method that searches for a recipe."""

METHODS = (
    *("dynamic", "static", "fp16", "weight-only", "graph"),
    *("onnxslim", "onnxoptimizer", "fixed-shapes", "olive"),
)
"""The optimizers of onnx-ops."""

SEARCH_FILE = "search.json"

Role: TypeAlias = Literal["fast", "small", "exact"]
ROLES: tuple[Role, ...] = ("fast", "small", "exact")
"""Points of the Pareto front that become variants.

The variants are NAME-fast, NAME-small and NAME-exact.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningData:
    """Rows on which a search measures the task metric of its trials."""

    data: Annotated[str, doc("Data set of `data`; must not be the data set that is scored.")]
    samples: Annotated[int, Ge(1), doc("Maximum number of rows.")] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a variant and of the search for it."""

    metric_drop: Annotated[
        Fraction,
        doc(
            "Largest loss of the task metric on the tuning rows, in percentage points; for an "
            "error metric such as rmse, its largest increase relative to its value in fp32."
        ),
    ] = 0.005
    size: Annotated[Bytes | None, doc("Largest size of a model.")] = None
    p99: Annotated[Seconds | None, doc("Largest 99th percentile of latency.")] = None
    max_minutes: Annotated[
        float, Gt(0), Le(1440), doc("Time limit of the search, over all attempts.")
    ] = 10.0
    max_builds: Annotated[Count, doc("Maximum number of models to build.")] = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to make a variant.

    `nodes` are the nodes that can stay in float individually; empty if the recipe has no such
    choice. A `deferred` recipe reduces size. It is tried after the search has improved the models
    of the other recipes.
    """

    name: str
    method: str
    options: Mapping[str, Json] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    deferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model that was built and measured on the tuning rows.

    `excluded` are the nodes that stay in float, and `why` is the reason for the trial. `drop` is
    the loss of the task metric against fp32 (negative: a gain), the largest over the targets.
    `error` is the root mean square distance of a float output from that of fp32, in units of its
    standard deviation. It is the largest over the outputs. `ratios` are request times divided by
    the request times of fp32, and `p99` is in seconds, both by target. `p99` is measured only if
    the budget limits it and permits `drop`. `failure` is the reason why there are no measurements.
    """

    recipe: str
    excluded: tuple[str, ...] = ()
    why: str = ""
    drop: float | None = None
    error: float | None = None
    size_bytes: int = 0
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    p99: Mapping[str, float] = field(default_factory=dict)
    model: Digest | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    @property
    def label(self) -> str:
        """Return the recipe, with the number of nodes left in float."""
        count = len(self.excluded)
        return self.recipe + (
            f" with {count} node{'s' if count > 1 else ''} in float" if count else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The error of the outputs if only this node were quantized.

    `error` is in the unit of `Trial.error`. It is None if the measurement failed; `failure` then
    gives the reason.
    """

    recipe: str
    node: str
    error: float | None = None
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLogEntry:
    """One line of a search's journal, which records one step."""

    trial: Trial | None = None
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContribution:
    """The effect of keeping one node in float.

    The other kept nodes stay the same. `metric` is the gain of the task metric (negative: a loss).
    `time` is the factor by which the request time changes, by target: 1.1 is 10 % more. `kept` is
    False if the node was quantized again.
    """

    recipe: str
    node: str
    metric: float
    time: Mapping[str, float]
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierSlot:
    """The trial that a search assigns to a role, or the reason why there is none.

    `trial` is an index of `SearchRecord.trials`; the trial is on the Pareto front.
    """

    role: Role
    trial: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """All trials and results of a search.

    `pareto_front` has indices of trials. `stopped` is the reason why the search ended. `timed_out`
    is whether it ended because the remaining time was too short for the next step.
    """

    schema: int = 1
    name: str
    metric: str
    rows: int
    export_bytes: int
    targets: tuple[str, ...]
    budget: Budget
    recipes: tuple[Recipe, ...] = ()
    trials: tuple[Trial, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    contributions: tuple[NodeContribution, ...] = ()
    pareto_front: tuple[int, ...] = ()
    slots: tuple[FrontierSlot, ...] = ()
    stopped: str = ""
    seconds: float = 0.0
    timed_out: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRecipe:
    """Types of static quantization.

    With `reduce_range`, weights have 7 bits. With `symmetric`, the ranges of activations are
    symmetric to 0. `notes` are the reasons for the type of activations and for `reduce_range`.
    """

    activations: str
    weights: str
    reduce_range: bool
    symmetric: bool
    notes: tuple[str, ...]


def choose_static_recipe(
    options: Mapping[str, Any], machines: Sequence[Arithmetic]
) -> StaticRecipe:
    """Return the types of static quantization for all machines.

    Activations are int8 if all machines are ARM CPUs or accelerators, and uint8 otherwise. Weights
    are int8. Types that the user has set are kept, even if a machine runs them slowly or wrongly.

    Args:
        options: `activations`, `weights`, `reduce_range`, `symmetric`, where the user has set them.
        machines: machines of all targets; if empty, x86 with VNNI is assumed.
    """
    families = {one.family for one in machines}
    signed = bool(families) and families <= {"arm", "accelerator"}
    activations = str(options.get("activations", "int8" if signed else "uint8"))
    weights = str(options.get("weights", "int8"))
    if "activations" in options:
        why = "as requested"
    elif signed:
        why = "the types that the kernels of every target accept"
    else:
        why = (
            "the types that x86 kernels accept; with int8 activations, operators stay in float or "
            "run slowly"
        )
    reduce_range, note = choose_reduce_range(
        options, machines, mixed=activations == "uint8" and weights == "int8"
    )
    return StaticRecipe(
        activations=activations,
        weights=weights,
        reduce_range=reduce_range,
        symmetric=bool(
            options.get("symmetric", activations == "int8" and "accelerator" in families)
        ),
        notes=(f"activations {activations}: {why}", note),
    )


def choose_reduce_range(
    options: Mapping[str, Any], machines: Sequence[Arithmetic], *, mixed: bool = True
) -> tuple[bool, str]:
    """Return whether weights get 7 bits, and why.

    Args:
        options: `reduce_range`, where the user has set it.
        mixed: whether uint8 activations are multiplied by int8 weights; only these products
            saturate.
    """
    needed = mixed and any(one.saturates for one in machines)
    if "reduce_range" in options:
        chosen = bool(options["reduce_range"])
        if needed and not chosen:
            return (
                False,
                (
                    "weights of 8 bits as requested: on a target without VNNI their products can "
                    "saturate"
                ),
            )
        return chosen, f"weights of {7 if chosen else 8} bits: as requested"
    if needed:
        return (
            True,
            (
                "weights of 7 bits: a target's CPU has no VNNI, and 8-bit products can saturate "
                "there"
            ),
        )
    return False, "weights of 8 bits: no target's CPU saturates their products"


def find_type_conflict(options: Mapping[str, Any]) -> str:
    """Return why a combination of types cannot work; empty if it can."""
    if options.get("activations") == "int8" and options.get("weights") == "uint8":
        return (
            "int8 activations with uint8 weights: no kernel accepts them; set weights: "
            "int8 or activations: uint8"
        )
    if options.get("activations") == "uint16" and options.get("reduce_range"):
        return "reduce_range is for products of 8 bits; leave it out with activations: uint16"
    return ""


def list_search_recipes(
    machines: Sequence[Arithmetic], *, calibrated: bool, small: bool
) -> tuple[Recipe, ...]:
    """Return the recipes that a search tries on all machines.

    The recipes are in ascending order of the cost of building a model, the deferred recipes last.

    The types of the recipes `dynamic` and `static` depend on the machines (`choose_static_recipe`,
    `choose_reduce_range`).

    Args:
        calibrated: whether there are calibration data, which static quantization needs.
        small: whether small models are wanted, not only fast ones.
    """
    recipes = [Recipe(name="dynamic", method="dynamic")]
    if machines and all(one.fp16 for one in machines):
        recipes.append(Recipe(name="fp16", method="fp16"))
    if calibrated:
        recipes.append(Recipe(name="static", method="static"))
    if small:
        recipes += [
            Recipe(
                name=f"weights-{bits}", method="weight-only", options={"bits": bits}, deferred=True
            )
            for bits in (8, 4)
        ]
    return tuple(recipes)
