"""Promotion policies: a YAML file that the registry's server reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx_ops.config.binding import bind_document
from onnx_ops.config.document import Document
from onnx_ops.config.reading import read_document
from onnx_ops.domain.release import PromotionPolicy
from onnx_ops.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedPolicy:
    """A policy and where it stands: `places` has `file:line` of each rule, `overrides_at` that of the overrides."""

    policy: PromotionPolicy
    places: tuple[str, ...]
    overrides_at: str


def load_policy(path: Path) -> LocatedPolicy:
    """Read a promotion policy.

    Raises:
        NotFoundError, UserError: there is no such file, or it cannot be read.
        ConfigError: it has problems; all of them at once.
    """
    document = read_document(path)
    policy: PromotionPolicy | None = bind_document(document, PromotionPolicy).value
    if policy is None or document.findings:
        raise ConfigError(tuple(document.problems()))
    return LocatedPolicy(
        policy=policy,
        places=tuple(_place(document, ("rules", index)) for index in range(len(policy.rules))),
        overrides_at=_place(document, ("overrides",)),
    )


def _place(document: Document, loc: tuple[str | int, ...]) -> str:
    place = document.places.get(loc) or document.places[()]
    return f"{Path(place.source).name}:{place.line}"
