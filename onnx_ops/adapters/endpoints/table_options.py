"""Options of endpoints whose servers follow signed routing tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Unit, doc

from onnx_ops.config.binding import bind_options
from onnx_ops.domain.quantities import Json


# Slots would break options that inherit from several dataclasses.
@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """Options for replicas without access to the store, or with an abandoned rollout."""

    judge_timeout: Annotated[
        float,
        Unit("s"),
        Ge(0),
        Le(604_800),
        doc(
            "Time without a reconciliation of the rollout after which a candidate loses its "
            "traffic; 0 s: never."
        ),
    ] = 1800.0
    lease: Annotated[
        Literal["serve", "leave"],
        doc(
            "What a replica does if it could not read the tables or report for 30 s: "
            "`serve` serves the stable version; `leave` refuses requests."
        ),
    ] = "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions(LeaseOptions):
    """Options of an endpoint whose servers follow tables.

    `control` and `reports` are URLs for fsspec, or paths.
    """

    control: Annotated[
        str,
        doc(
            "Location of tables and models, which replicas read, such as s3://bucket/prefix or a "
            "folder."
        ),
    ]
    reports: Annotated[
        str, doc("Location of the reports, which replicas write; with separate permissions.")
    ]
    replicas: Annotated[int, Ge(1), Le(10_000), doc("Number of replicas that should run.")] = 1
    address: Annotated[str, doc("Address that clients call, such as that of a load balancer.")] = ""


def read_replica_options(values: Mapping[str, Json], where: str = "") -> ReplicaOptions:
    """Return the options of an endpoint whose replicas users start.

    Raises:
        OptionsError: the options are wrong or contradict each other.
    """
    return bind_options(
        values,
        ReplicaOptions,
        where=where,
        rules=lambda options: find_overlap(options.control, options.reports),
    )


def find_overlap(control: str, reports: str) -> Iterator[tuple[str, str]]:
    """Yield an error if replicas that write reports could also write tables."""
    control, reports = control.rstrip("/"), reports.rstrip("/")
    if control == reports or control.startswith(f"{reports}/") or reports.startswith(f"{control}/"):
        yield (
            "reports",
            (
                "must be neither `control` nor a parent or subfolder of it: replicas write to "
                "`reports`, but must not write tables"
            ),
        )
