"""Every field of a managed online deployment is set by the provider, or documented as unsupported.

A new version of azure-ai-ml with another field fails these tests.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from tests.adapters.azureml_parts import World, config_of
from tests.support.extras import require
from tests.support.processes import ROOT

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

pytestmark = pytest.mark.services


def list_fields() -> set[str]:
    """Return the fields of the SDK's constructor."""
    from azure.ai.ml.entities import ManagedOnlineDeployment

    return set(inspect.signature(ManagedOnlineDeployment).parameters) - {"kwargs"}


def list_unsupported_fields() -> set[str]:
    """Return the fields that the docs list as unsupported."""
    page = (ROOT / "docs" / "azureml-options.md").read_text(encoding="utf-8")
    section = page.partition("## Fields that are not supported")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_azureml_fields_are_set_or_documented_as_unsupported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from azure.ai.ml import entities

    fields, given, build = list_fields(), set[str](), entities.ManagedOnlineDeployment

    def record(**options: Any) -> Any:
        given.update(options)
        return build(**options)

    monkeypatch.setattr(entities, "ManagedOnlineDeployment", record)
    world.apply(1, blue=100)
    unsupported = list_unsupported_fields()
    assert not given & unsupported
    assert given | unsupported == fields


def test_azureml_apply_with_egress_and_app_insights_sets_fields(world: World) -> None:
    world.apply(1, blue=100)
    name = world.name(world.blue)
    changed = config_of(world.cloud, egress="disabled", app_insights=True)
    assert world.drift(changed) == [
        f"app_insights of {name}: False, not True",
        f"egress of {name}: enabled, not disabled",
    ]
    world.apply(2, changed, blue=100)
    assert world.drift(changed) == []
    (resource,) = (
        one.body["properties"]
        for path, one in world.cloud.control.resources.items()
        if "/deployments/" in path
    )
    assert resource["egressPublicNetworkAccess"].lower() == "disabled"
    assert resource["appInsightsEnabled"] is True
