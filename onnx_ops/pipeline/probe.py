"""Read the data, code, tools and machines on which a plan depends.

No query imports a framework.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx_ops import plugins
from onnx_ops.domain.arithmetic import Arithmetic, detect_arithmetic
from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pinned_address import is_pinned_address
from onnx_ops.domain.pipeline import DataSection, Quantize, SystemComparison
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.pipeline.stage_settings import REQUIREMENTS
from onnx_ops.pipeline.stages.data import get_source_name
from onnx_ops.pipeline.user_code import UserCode, collect_user_code
from onnx_ops.ports import Context


@dataclass(frozen=True)
class ProjectProbe:
    """Queries with which a plan reads the project and this machine.

    The queries import no framework.
    """

    context: Context

    def data(self, section: DataSection) -> str:
        """Return the fingerprint of a data set."""
        return self.context.source(get_source_name(section)).fingerprint(section, self.context.root)

    def origin(self, section: DataSection) -> Mapping[str, str]:
        """Return the origin of a data set; empty if its source records none."""
        return self.context.source(get_source_name(section)).origin(section, self.context.root)

    def code(self, reference: str, depends: tuple[str, ...] = ()) -> UserCode:
        """Return the code that the module of a function can import, and `depends`."""
        return collect_user_code((reference,), self.context.root, depends)

    def system(self, section: SystemComparison) -> Digest:
        """Return the digest of the code, the graphs and the raw inputs of a comparison."""
        # These imports load NumPy and onnx. Only plans with a section `system` need them.
        from onnx_ops.measure.system_inputs import digest_raw_inputs
        from onnx_ops.onnx_graph.files import digest_model

        root = self.context.root
        code = [
            collect_user_code((reference,), root, section.depends, where="system.depends").digest()
            for _, reference in section.list_functions()
        ]
        graphs = [digest_model(root / graph) for _, graph in section.list_graphs()]
        files = digest_raw_inputs(root / section.files, section.rows, where="system.files")
        return digest_json([code, graphs, files])

    def model(self, path: str) -> Digest:
        """Return the digest of an existing model."""
        return self.context.models.digest(path)

    def tools(
        self, kind: str, name: str, env: Environment | None = None, *, trains: bool = False
    ) -> Mapping[str, str]:
        """Return the versions of the packages that affect a plugin's results.

        With `trains`, the packages that only an export needs are left out. If an exporter or
        optimizer runs in an isolated environment, the requirements of the environment replace the
        packages' versions. For a runtime in an isolated environment, both are left out.
        """
        versions = {
            "onnx-ops": plugins.version("onnx-ops"),
            "python": ".".join(platform.python_version_tuple()[:2]),
        }
        if (offered := plugins.distribution(kind, name)) is not None:
            versions[offered] = plugins.version(offered)
        plugin = plugins.load(kind, name)
        shaping = plugin.tools
        if kind == "runtimes":
            # For an isolated environment, the digest of the target includes the environment's
            # requirements.
            return versions | ({} if env is not None and env.isolated else _versions(shaping))
        if kind != "data" and (wanted := plugins.select_environment(plugin, env)) is not None:
            return versions | {
                "python": wanted.python or versions["python"],
                REQUIREMENTS: ", ".join(wanted.requirements),
            }
        return versions | _versions(shaping if trains else (*shaping, *plugin.converters))

    def metric_tools(self, definitions: Iterable[MetricDefinition]) -> Mapping[str, str]:
        """Return the versions of the packages that compute these metrics.

        Only metrics with an extra need further packages.
        """
        extras = {definition.extra for definition in definitions} - {""}
        return _versions(name for extra in sorted(extras) for name in plugins.EXTRAS[extra])

    def inline_files(self, entry: Quantize) -> Quantize:
        """Return the entry with the content of files instead of their names."""
        return self.context.optimizer(entry.method, entry.env).inline_files(
            entry, self.context.root
        )

    def is_quantizer(self, entry: Quantize) -> bool:
        """Return whether the variant of an entry differs from its source by design."""
        return self.context.optimizer(entry.method, entry.env).quantizes(self.inline_files(entry))

    def hardware(self, target: Target) -> Digest:
        """Return the digest of this machine, or of the machines of the target's pool."""
        return self._machine(target).digest()

    def arithmetic(self, target: Target) -> Arithmetic:
        """Return the low-precision arithmetic that a target's machine supports."""
        return detect_arithmetic(self._machine(target), target)

    def _machine(self, target: Target) -> HardwareFingerprint:
        """Return the properties of this machine, or those required of the target's pool."""
        here = self.context.runtime(target.runtime).fingerprint(target)
        return target.requires.least(here) if target.pool else here

    def signer(self) -> Digest | None:
        """Return the digest of the signing key; None if nothing is signed."""
        signer = self.context.signer()
        return None if signer is None else signer.key


@dataclass(frozen=True)
class OfflineProbe(ProjectProbe):
    """A `ProjectProbe` for a plan that is only shown.

    Remote models are not requested. A DVC repository with a URL is still requested, since the
    fingerprint depends on it.
    """

    def model(self, path: str) -> Digest:
        """Return the digest of an existing model.

        For a remote model without a pin, this is a digest of its address. No cached result has
        this digest.
        """
        return digest_json(["not asked", path]) if needs_request(path) else super().model(path)


@dataclass(frozen=True)
class OutlineProbe(ProjectProbe):
    """A `ProjectProbe` for a plan that only lists stages and their needs.

    The plan is never run. The probe does not read data or models, or create keys.
    """

    signing: str = "off"

    def data(self, section: DataSection) -> str:
        """Return an empty fingerprint."""
        return ""

    def origin(self, section: DataSection) -> Mapping[str, str]:
        """Return no origin."""
        return {}

    def system(self, section: SystemComparison) -> Digest:
        """Return the digest of the name of the project's function."""
        return digest_json(section.source)

    def model(self, path: str) -> Digest:
        """Return the digest of the model's path, not of its content."""
        return digest_json(path)

    def signer(self) -> Digest | None:
        """Return the digest of the signing key; None if nothing is signed.

        With `signing = 'auto'`, the key need not exist yet, so another digest is returned.
        """
        if self.signing in ("off", "auto"):
            return None if self.signing == "off" else digest_json(self.signing)
        return super().signer()


@dataclass(frozen=True)
class ReleaseProbe(OutlineProbe):
    """An `OutlineProbe` for a plan that runs only its gates and its release.

    The probe returns the digest of the signing key. It does not read the properties of a machine.
    """

    def hardware(self, target: Target) -> Digest:
        """Return the digest of the target's name."""
        return digest_json(target.name)

    def arithmetic(self, target: Target) -> Arithmetic:
        """Return the same arithmetic for all targets."""
        return Arithmetic(family="other")

    def signer(self) -> Digest | None:
        """Return the digest of the signing key; None if nothing is signed."""
        return ProjectProbe.signer(self)


def needs_request(model: str) -> bool:
    """Return whether only a request shows whether a model has changed."""
    return is_remote(model) and not is_pinned_address(model)


def is_remote(model: str) -> bool:
    """Return whether a model is named by a URL or the registry, not by a path."""
    return "://" in model or model.startswith("models:/")


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    return {name: plugins.version(name) for name in distributions}
