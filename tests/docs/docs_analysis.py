"""Checks of snippets for Argo Rollouts and Flagger against published schemas.

`crds` has parts of the schemas. Kubernetes drops unknown keys silently, so they are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CRDS = Path(__file__).parent / "crds"
MAX_LINES = 10


def load_schema(name: str) -> Any:
    """Return a schema that refuses unknown keys."""
    return _close(yaml.safe_load((CRDS / f"{name}.yaml").read_text(encoding="utf-8")))


def find_check(document: dict[str, Any]) -> Callable[[dict[str, Any]], None] | None:
    """Return the check of a snippet, or None if it is not one of these programs."""
    if document.get("kind") == "AnalysisTemplate":
        return _check_template
    if set(document) == {"steps"}:
        return _check_steps
    if set(document) == {"analysis"}:
        return _check_flagger
    return None


def _check_template(document: dict[str, Any]) -> None:
    jsonschema.validate(document, load_schema("argo-analysis-template"))


def _check_steps(document: dict[str, Any]) -> None:
    jsonschema.validate(document["steps"], load_schema("argo-canary-steps"))


def _check_flagger(document: dict[str, Any]) -> None:
    jsonschema.validate(document["analysis"], load_schema("flagger-analysis"))


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and not is_open:
        closed.setdefault("additionalProperties", False)
    return closed
