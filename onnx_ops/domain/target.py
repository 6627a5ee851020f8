"""Targets, the named places that a model must run on, and machines that measure."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, MinLen, doc

from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.execution import CPU, Environment, Execution, Provider, SessionSettings
from onnx_ops.domain.gate import TargetGate
from onnx_ops.domain.quantities import (
    OMIT_DEFAULT,
    Amount,
    Bytes,
    Json,
    Notation,
    Pattern,
    ShortName,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One line of a diagnosis: the check, its finding, and a remedy.

    A check that succeeds needs no remedy.

    `absent`: an optional component is missing, which is not a fault.
    """

    check: str
    ok: bool
    found: str
    remedy: str = ""
    absent: bool = False


CpuFlag: TypeAlias = Literal[
    "amx_bf16",
    "amx_int8",
    "amx_tile",
    "asimd",
    "asimddp",
    "asimdhp",
    "avx",
    "avx2",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512bw",
    "avx512f",
    "avx512vl",
    "avx_vnni",
    "bf16",
    "f16c",
    "fma",
    "i8mm",
    "sse4_1",
    "sse4_2",
    "sve",
    "sve2",
]
"""CPU features that select ONNX Runtime's kernels, as Linux names them.

A fingerprint leaves out all other features.
"""

SPEED_FLAGS: tuple[str, ...] = get_args(CpuFlag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of a machine that measures the target."""

    machine: Annotated[str, doc("Architecture, as printed by `uname -m`: x86_64, aarch64.")] = ""
    cpu: Annotated[str, doc("Part of the CPU's name, case-insensitive: 'EPYC 9R14'.")] = ""
    cpu_flags: Annotated[tuple[CpuFlag, ...], doc("CPU features that select kernels.")] = ()
    cores: Annotated[int, Ge(0), doc("Minimum number of cores available to a process.")] = 0
    memory: Annotated[Bytes | None, doc("Minimum memory.")] = None
    accelerator: Annotated[str, doc("Part of an accelerator's name, case-insensitive: 'H100'.")] = (
        ""
    )
    driver: Annotated[str, doc("Minimum driver version of the accelerator: '550.54'.")] = ""

    def least(self, here: HardwareFingerprint) -> HardwareFingerprint:
        """Return a machine that just satisfies the requirements.

        The runtime of the returned machine is that of `here`.
        """
        return HardwareFingerprint(
            machine=self.machine or here.machine,
            cpu_model=self.cpu,
            cpu_flags=self.cpu_flags,
            cores=self.cores,
            memory_bytes=self.memory or 0,
            runtime=here.runtime,
            runtime_version=here.runtime_version,
            accelerators=(self.accelerator,) if self.accelerator else (),
            driver=self.driver,
        )

    def find_missing(self, fingerprint: HardwareFingerprint) -> tuple[str, ...]:
        """Return what the machine lacks, as clauses; empty if it meets the requirements."""
        flags = [flag for flag in self.cpu_flags if flag not in fingerprint.cpu_flags]
        named = [
            name for name in fingerprint.accelerators if self.accelerator.lower() in name.lower()
        ]
        checks = {
            f"its architecture is {fingerprint.machine}, not {self.machine}": self.machine
            in ("", fingerprint.machine),
            f"its CPU is {fingerprint.cpu_model}, not {self.cpu}": self.cpu.lower()
            in fingerprint.cpu_model.lower(),
            f"its CPU lacks {', '.join(flags)}": not flags,
            f"it has {fingerprint.cores} of {self.cores} cores": fingerprint.cores >= self.cores,
            f"it has {fingerprint.memory_bytes / 1e9:.1f} of {(self.memory or 0) / 1e9:.1f} GB "
            "of memory": (fingerprint.memory_bytes >= (self.memory or 0)),
            f"it has no accelerator called {self.accelerator}": not self.accelerator or bool(named),
            f"its driver is {fingerprint.driver or 'not known'}, "
            f"and at least {self.driver} is required": (
                not self.driver or _version(fingerprint.driver) >= _version(self.driver)
            ),
        }
        return tuple(reason for reason, fits in checks.items() if not fits)


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers of a dotted version.

    The result is empty for a string that does not start with a number.
    """
    parts = [re.match(r"\d+", part) for part in text.split(".")]
    return tuple(int(part.group()) for part in itertools.takewhile(bool, parts) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFingerprint:
    """The machine and runtime of a measurement.

    Machines with equal fingerprints can share cached benchmarks.
    """

    machine: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    runtime: str
    runtime_version: str
    accelerators: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    driver: str = field(default="", metadata=OMIT_DEFAULT)

    def digest(self) -> Digest:
        """Return the digest that names the machine and runtime."""
        return digest_json(
            [
                self.machine,
                self.cpu_model,
                sorted(self.cpu_flags),
                self.cores,
                self.memory_bytes,
                self.runtime,
                self.runtime_version,
                *([list(self.accelerators), self.driver] if self.accelerators else []),
            ]
        )


_NO_DIGEST = Digest("")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOps:
    """A shared library of custom operators that a target needs.

    A file names the library by `path` and `digest`, or by `package`. In the second case, path and
    digest are those of the library in the installed package. They are set when the target is
    loaded.
    """

    path: Annotated[str, doc("Path of the library, relative to the project's root.")] = ""
    digest: Annotated[
        Digest,
        Pattern("sha256:[0-9a-f]{64}", "a digest: sha256: and 64 digits of 0-9a-f"),
        doc("Digest of the library, `sha256:` and 64 digits; a different library is not loaded."),
    ] = _NO_DIGEST
    package: Annotated[
        str,
        Pattern(
            "[A-Za-z_][A-Za-z0-9_]*",
            "the name of a package as Python imports it, such as onnxruntime_extensions",
        ),
        doc("Installed Python package whose folder has the library, instead of path and digest."),
    ] = field(default="", metadata=OMIT_DEFAULT)
    domains: Annotated[
        tuple[str, ...], MinLen(1), doc("Operator domains that the library registers.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrtFormat:
    """Conversion of the variant to an `.ort` file.

    Minimal builds of ONNX Runtime, such as on phones, read this format.

    `fixed` applies the graph optimizations of `session.graph_level`; `runtime` leaves some to a
    provider that compiles its part of the graph.
    """

    platform: Annotated[Literal["arm", "amd64"], doc("Processors to optimize for.")] = "arm"
    style: Annotated[
        Literal["fixed", "runtime"],
        doc("fixed: optimize for the CPU; runtime: for NNAPI and CoreML."),
    ] = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A named combination of runtime build, execution provider and machine."""

    schema: Annotated[int, Ge(1)] = 1
    name: Annotated[
        ShortName,
        doc("Name of the target: lower-case letters, digits and hyphens; part of aliases."),
    ]
    description: str = ""
    runtime: Annotated[str, doc("Runtime plugin that runs models on this target.")] = "onnxruntime"
    providers: Annotated[
        tuple[Provider, ...], MinLen(1), doc("Execution providers in order of preference.")
    ] = (Provider(name=CPU),)
    session: SessionSettings = field(default_factory=SessionSettings)
    max_opset: Annotated[
        int, Ge(7), doc("Newest opset of the default domain that this runtime build accepts.")
    ] = 26
    max_ir_version: Annotated[
        int, Ge(3), doc("Newest IR version that this runtime build accepts.")
    ] = 13
    requires: Annotated[
        Requirements, doc("Requirements of the machine; other machines do not measure this target.")
    ] = field(default_factory=Requirements)
    pool: Annotated[
        str, doc("Prefect work pool whose workers measure this target; default: this machine.")
    ] = ""
    custom_ops: Annotated[
        tuple[CustomOps, ...],
        Notation.SINGLE_ENTRY,
        doc("Libraries of custom operators that sessions register."),
    ] = ()
    ort_format: Annotated[
        OrtFormat | None, doc("Run an `.ort` file converted from the variant.")
    ] = None
    gates: Annotated[
        tuple[TargetGate, ...],
        doc("Gates of this target; each replaces the pipeline's gates of the same kind."),
    ] = ()
    env: Annotated[Environment | None, doc("Isolated environment of the runtime build.")] = None
    dedicated: Annotated[
        bool, doc("Whether the machine runs nothing else; absolute speed limits are then enforced.")
    ] = False
    price_per_hour: Annotated[
        Amount | None, doc("Price of an hour, in any currency; for `objective: cost`.")
    ] = None

    @property
    def execution(self) -> Execution:
        """Execution providers and session settings."""
        return Execution(providers=self.providers, session=self.session)

    def digest(self) -> Digest:
        """Return the digest of everything that shapes a measurement.

        The name, the description, the gates, the price, and the limits of the environment are left
        out, since they do not affect a measurement.
        """
        session = self.session
        optional: dict[str, Json] = {
            "custom_ops": sorted(library.digest for library in self.custom_ops),
            "env": None if self.env is None else self.env.content(),
            "requires": {name: value for name, value in asdict(self.requires).items() if value},
            "pool": self.pool,
            "ort_format": None if self.ort_format is None else asdict(self.ort_format),
        }
        required: dict[str, Json] = {
            "runtime": self.runtime,
            "providers": [
                {
                    "name": p.name,
                    "options": dict(p.options),
                    **({"package": p.package} if p.package else {}),
                }
                for p in self.providers
            ],
            "session": [
                session.intra_op_threads,
                session.inter_op_threads,
                session.spinning,
                session.graph_level,
                dict(session.config),
            ],
            "ceiling": [self.max_opset, self.max_ir_version],
            "dedicated": self.dedicated,
        }
        return digest_json({**required, **{key: value for key, value in optional.items() if value}})


AS_WRITTEN = Target(
    name="as-written",
    description="One CPU thread, the unmodified graph of the file.",
    session=SessionSettings(graph_level="disabled"),
)

SIMPLIFIED = replace(AS_WRITTEN, name="simplified", session=SessionSettings(graph_level="basic"))
