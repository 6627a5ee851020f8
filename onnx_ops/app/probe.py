"""Answers the cheap questions of a plan."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx_ops import plugins
from onnx_ops.app.context import environment
from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import DataSection, Quantize
from onnx_ops.domain.quantization import Arithmetic, detect_arithmetic
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.pipeline import UserCode, collect_user_code
from onnx_ops.pipeline.stage_settings import REQUIREMENTS
from onnx_ops.pipeline.stages.data import get_source_name
from onnx_ops.ports import ConfiguredOptimizer, Ports, TracedSource


@dataclass(frozen=True)
class ProjectProbe:
    """What a plan starts from, read off the project without importing a framework."""

    ports: Ports

    def data(self, section: DataSection) -> str:
        return self.ports.source(get_source_name(section)).fingerprint(section, self.ports.root)

    def origin(self, section: DataSection) -> Mapping[str, str]:
        source = self.ports.source(get_source_name(section))
        return source.origin(section, self.ports.root) if isinstance(source, TracedSource) else {}

    def code(self, reference: str, depends: tuple[str, ...] = ()) -> UserCode:
        return collect_user_code((reference,), self.ports.root, depends)

    def model(self, path: str) -> Digest:
        return self.ports.models.digest(path)

    def tools(self, kind: str, name: str, env: Environment | None = None, *, trains: bool = False) -> Mapping[str, str]:
        found = {"onnx-ops": plugins.version("onnx-ops"), "python": ".".join(platform.python_version_tuple()[:2])}
        if (offered := plugins.distribution(kind, name)) is not None:
            found[offered] = plugins.version(offered)
        plugin = plugins.load(kind, name)
        shaping = tuple(getattr(plugin, "tools", (name,) if kind == "runtimes" else ()))
        if kind == "runtimes":
            # One in an environment of its own has its build in its target's digest.
            return found | ({} if env is not None and env.isolated else _versions(shaping))
        if kind != "data" and (wanted := environment(plugin, env)) is not None:
            return found | {"python": wanted.python or found["python"], REQUIREMENTS: ", ".join(wanted.requirements)}
        return found | _versions(shaping if trains else (*shaping, *getattr(plugin, "converters", ())))

    def settled(self, entry: Quantize) -> Quantize:
        found = self.ports.optimizer(entry.method, entry.env)
        return found.settle(entry, self.ports.root) if isinstance(found, ConfiguredOptimizer) else entry

    def is_quantizer(self, entry: Quantize) -> bool:
        found = self.ports.optimizer(entry.method, entry.env)
        return found.quantizes(self.settled(entry)) if isinstance(found, ConfiguredOptimizer) else found.quantized

    def hardware(self, target: Target) -> Digest:
        return self._machine(target).digest()

    def arithmetic(self, target: Target) -> Arithmetic:
        return detect_arithmetic(self._machine(target), target)

    def _machine(self, target: Target) -> HardwareFingerprint:
        """This machine, or what a pool's machines are required to be: which of them will measure is not known yet."""
        here = self.ports.runtime(target.runtime).fingerprint(target)
        return target.requires.least(here) if target.pool else here

    def signer(self) -> Digest | None:
        signer = self.ports.signer()
        return None if signer is None else signer.key


@dataclass(frozen=True)
class OutlineProbe(ProjectProbe):
    """As `ProjectProbe`, for a plan that says which stages there are and what they need, and is never run.

    No data and no model is read or asked for, and no key is made.
    """

    signing: str = "off"

    def data(self, section: DataSection) -> str:
        return ""

    def origin(self, section: DataSection) -> Mapping[str, str]:
        return {}

    def model(self, path: str) -> Digest:
        return digest_json(path)

    def signer(self) -> Digest | None:
        if self.signing in ("off", "auto"):
            return None if self.signing == "off" else digest_json(self.signing)
        return super().signer()


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    return {name: plugins.version(name) for name in distributions}
