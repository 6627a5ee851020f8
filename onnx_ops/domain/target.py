"""Targets: named places a model must run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen, Predicate, doc

from onnx_ops.domain.artifact import Digest, digest_json, is_digest
from onnx_ops.domain.environment import Environment
from onnx_ops.domain.quantities import Amount, Json

GraphLevel = Literal["disabled", "basic", "extended", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How the runtime builds a session. Threads: 0 lets the runtime choose."""

    intra_op_threads: Annotated[int, Ge(0), Le(1024), doc("Threads inside one operator; 0: one per core.")] = 1
    inter_op_threads: Annotated[int, Ge(0), Le(1024), doc("Operators run side by side; 0: one per core.")] = 1
    spinning: Annotated[bool, doc("Threads spin while they wait; fast alone, poison on shared cores.")] = False
    graph_level: Annotated[GraphLevel, doc("Graph optimisation level of ONNX Runtime.")] = "all"
    config: Annotated[Mapping[str, str], doc("Further session config entries, as the runtime names them.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider and its options."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOps:
    """A shared library of operators that the runtime does not have."""

    path: Annotated[str, doc("The library, relative to the project's root.")]
    digest: Annotated[
        Digest, Predicate(is_digest), doc("Its digest, `sha256:` and 64 digits; another library is not loaded.")
    ]
    domains: Annotated[tuple[str, ...], MinLen(1), doc("Operator domains that it registers.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A runtime build, an execution provider and a machine, under one name."""

    schema: Annotated[int, Ge(1)] = 1
    name: Annotated[str, doc("Lower-case letters, digits and dashes; short, since it becomes part of an alias.")]
    description: str = ""
    runtime: Annotated[str, doc("Plugin that runs models on this target.")] = "onnxruntime"
    providers: Annotated[tuple[Provider, ...], MinLen(1), doc("Execution providers in order of preference.")] = (
        Provider(name="CPUExecutionProvider"),
    )
    session: SessionSettings = field(default_factory=SessionSettings)
    max_opset: Annotated[int, Ge(7), doc("Newest opset of the default domain that this runtime build accepts.")] = 26
    max_ir_version: Annotated[int, Ge(3), doc("Newest IR version that this runtime build accepts.")] = 13
    requires_cpu_flags: Annotated[tuple[str, ...], doc("CPU features without which figures mean nothing.")] = ()
    custom_ops: Annotated[tuple[CustomOps, ...], doc("Libraries of operators that sessions register.")] = ()
    env: Annotated[Environment | None, doc("The runtime build lives in an environment of its own.")] = None
    dedicated: Annotated[bool, doc("Nothing else runs here: absolute latency gates are enforced.")] = False
    price_per_hour: Annotated[Amount | None, doc("What an hour of it costs, in any currency; for `prefer: cost`.")] = (
        None
    )

    def digest(self) -> Digest:
        """Digest of everything that shapes a measurement (description and price do not)."""
        return digest_json(_measured(self))


def _measured(target: Target) -> Json:
    session = target.session
    libraries = {"custom_ops": sorted(library.digest for library in target.custom_ops)} if target.custom_ops else {}
    environment: dict[str, Json] = {} if target.env is None else {"env": target.env.content()}
    return {
        **libraries,
        **environment,
        "runtime": target.runtime,
        "providers": [{"name": p.name, "options": dict(p.options)} for p in target.providers],
        "session": [
            session.intra_op_threads,
            session.inter_op_threads,
            session.spinning,
            session.graph_level,
            dict(session.config),
        ],
        "ceiling": [target.max_opset, target.max_ir_version],
        "cpu_flags": sorted(target.requires_cpu_flags),
        "dedicated": target.dedicated,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFingerprint:
    """What a figure was measured on. Two machines with one fingerprint may share cached benchmarks."""

    machine: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    runtime: str
    runtime_version: str

    def digest(self) -> Digest:
        return digest_json(
            [
                self.machine,
                self.cpu_model,
                sorted(self.cpu_flags),
                self.cores,
                self.memory_bytes,
                self.runtime,
                self.runtime_version,
            ]
        )
