"""Answers the cheap questions of a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from onnx_ops import plugins
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.hardware import HardwareFingerprint
from onnx_ops.domain.pipeline import DataSection, Quantize
from onnx_ops.domain.recipes import Arithmetic, arithmetic
from onnx_ops.domain.target import Target
from onnx_ops.engine import code_digest
from onnx_ops.ports import ConfiguredOptimizer, Ports, TracedSource
from onnx_ops.stages.data import source_of


@dataclass(frozen=True)
class ProjectProbe:
    """What a plan starts from, read off the project without importing a framework."""

    ports: Ports

    def data(self, section: DataSection) -> str:
        return self.ports.source(source_of(section)).fingerprint(section, self.ports.root)

    def origin(self, section: DataSection) -> Mapping[str, str]:
        source = self.ports.source(source_of(section))
        return source.origin(section, self.ports.root) if isinstance(source, TracedSource) else {}

    def code(self, reference: str, depends: tuple[str, ...]) -> Digest:
        return code_digest(reference, self.ports.root, depends)

    def model(self, path: str) -> Digest:
        return self.ports.models.digest(path)

    def tools(self, kind: str, name: str) -> Mapping[str, str]:
        found = {"onnx-ops": _version("onnx-ops")}
        if (offered := plugins.distribution(kind, name)) is not None:
            found[offered[0]] = offered[1]
        if kind in ("exporters", "optimizers") and (own := getattr(plugins.load(kind, name), "requirements", ())):
            return found | {"requirements": ", ".join(own)}
        return found | {tool: _version(tool) for tool in self._shaping(kind, name)}

    def settled(self, entry: Quantize) -> Quantize:
        found = self.ports.optimizer(entry.method, entry.env)
        return found.settle(entry, self.ports.root) if isinstance(found, ConfiguredOptimizer) else entry

    def is_quantizer(self, entry: Quantize) -> bool:
        found = self.ports.optimizer(entry.method, entry.env)
        return found.quantizes(self.settled(entry)) if isinstance(found, ConfiguredOptimizer) else found.quantized

    def hardware(self, target: Target) -> Digest:
        return self._machine(target).digest()

    def arithmetic(self, target: Target) -> Arithmetic:
        return arithmetic(self._machine(target), target)

    def _machine(self, target: Target) -> HardwareFingerprint:
        """This machine, or what a pool's machines are required to be: which of them will measure is not known yet."""
        here = self.ports.runtime(target.runtime).fingerprint(target)
        return target.requires.least(here) if target.pool else here

    def signer(self) -> Digest | None:
        signer = self.ports.signer()
        return None if signer is None else signer.key

    def _shaping(self, kind: str, name: str) -> tuple[str, ...]:
        match kind:
            case "exporters":
                return self.ports.exporter(name).tools
            case "optimizers":
                return self.ports.optimizer(name).tools
            case "runtimes":
                return tuple(getattr(self.ports.runtime(name), "tools", (name,)))
            case _:
                return (name,)


@functools.cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
