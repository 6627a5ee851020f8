"""Targets: named places a model must run on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, MinLen, Predicate, doc

from onnx_ops.domain.artifact import Digest, digest_json, is_digest
from onnx_ops.domain.environment import Environment
from onnx_ops.domain.execution import CPU, Execution, Provider, SessionSettings
from onnx_ops.domain.gate import TargetGate
from onnx_ops.domain.hardware import Requirements
from onnx_ops.domain.quantities import Amount, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOps:
    """A shared library of operators that the runtime does not have."""

    path: Annotated[str, doc("The library, relative to the project's root.")]
    digest: Annotated[
        Digest, Predicate(is_digest), doc("Its digest, `sha256:` and 64 digits; another library is not loaded.")
    ]
    domains: Annotated[tuple[str, ...], MinLen(1), doc("Operator domains that it registers.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrtFormat:
    """The model goes there as an `.ort` file, which builds of ONNX Runtime for phones load; it is made of the variant.

    `fixed` has all optimizations of the graph done; `runtime` leaves some to a provider that compiles its part.
    """

    platform: Annotated[Literal["arm", "amd64"], doc("Processors that it is optimized for.")] = "arm"
    style: Annotated[Literal["fixed", "runtime"], doc("Optimized for the CPU, or for NNAPI and CoreML.")] = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A runtime build, an execution provider and a machine, under one name."""

    schema: Annotated[int, Ge(1)] = 1
    name: Annotated[str, doc("Lower-case letters, digits and dashes; short, since it becomes part of an alias.")]
    description: str = ""
    runtime: Annotated[str, doc("Plugin that runs models on this target.")] = "onnxruntime"
    providers: Annotated[tuple[Provider, ...], MinLen(1), doc("Execution providers in order of preference.")] = (
        Provider(name=CPU),
    )
    session: SessionSettings = field(default_factory=SessionSettings)
    max_opset: Annotated[int, Ge(7), doc("Newest opset of the default domain that this runtime build accepts.")] = 26
    max_ir_version: Annotated[int, Ge(3), doc("Newest IR version that this runtime build accepts.")] = 13
    requires: Annotated[Requirements, doc("What the machine must have; elsewhere nothing is measured.")] = field(
        default_factory=Requirements
    )
    pool: Annotated[str, doc("Prefect work pool whose workers measure this target; this machine if left out.")] = ""
    custom_ops: Annotated[tuple[CustomOps, ...], doc("Libraries of operators that sessions register.")] = ()
    ort_format: Annotated[OrtFormat | None, doc("What runs is an `.ort` file made of the variant.")] = None
    gates: Annotated[
        tuple[TargetGate, ...], doc("Limits here: for each kind of gate, instead of the pipeline's of that kind.")
    ] = ()
    env: Annotated[Environment | None, doc("The runtime build lives in an environment of its own.")] = None
    dedicated: Annotated[bool, doc("Nothing else runs here: absolute latency gates are enforced.")] = False
    price_per_hour: Annotated[Amount | None, doc("What an hour of it costs, in any currency; for `prefer: cost`.")] = (
        None
    )

    @property
    def execution(self) -> Execution:
        return Execution(providers=self.providers, session=self.session)

    def digest(self) -> Digest:
        """Digest of everything that shapes a measurement (description, price and limits do not)."""
        return digest_json(_measured(self))


def _measured(target: Target) -> Json:
    session = target.session
    libraries = {"custom_ops": sorted(library.digest for library in target.custom_ops)} if target.custom_ops else {}
    environment: dict[str, Json] = {} if target.env is None else {"env": target.env.content()}
    wanted = {name: value for name, value in asdict(target.requires).items() if value}
    return {
        **libraries,
        **environment,
        **({"requires": wanted} if wanted else {}),
        **({"pool": target.pool} if target.pool else {}),
        **({"ort_format": asdict(target.ort_format)} if target.ort_format else {}),
        "runtime": target.runtime,
        "providers": [
            {"name": p.name, "options": dict(p.options), **({"package": p.package} if p.package else {})}
            for p in target.providers
        ],
        "session": [
            session.intra_op_threads,
            session.inter_op_threads,
            session.spinning,
            session.graph_level,
            dict(session.config),
        ],
        "ceiling": [target.max_opset, target.max_ir_version],
        "dedicated": target.dedicated,
    }
