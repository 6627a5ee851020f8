"""Autoscale settings of Azure Monitor for the deployments of the fake."""

from __future__ import annotations

import json
import re

from tests.support.clouds.azureml_resources import Body, refuse, reply
from tests.support.clouds.azureml_web import Call, Reply

_SETTINGS = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Insights/autoscaleSettings(/(?P<name>[^/]+))?"
)


class Autoscale:
    """Settings by name. They have no effect on the fake's instances."""

    def __init__(self) -> None:
        self.settings: dict[str, Body] = {}

    def concerns(self, path: str) -> bool:
        return _SETTINGS.fullmatch(path) is not None

    def answer(self, call: Call) -> Reply:
        found = _SETTINGS.fullmatch(call.path)
        name = found["name"] if found is not None else None
        if name is None:
            return reply(200, {"value": list(self.settings.values())})
        if call.method == "PUT":
            return self._put(name, json.loads(call.body))
        if call.method == "DELETE":
            return reply(200 if self.settings.pop(name, None) else 204)
        if name not in self.settings:
            return refuse(404, "ResourceNotFound", f"The Resource '{call.path}' was not found.")
        return reply(200, self.settings[name])

    def _put(self, name: str, body: Body) -> Reply:
        """Store a setting.

        Azure accepts numbers of instances only as text, and only one setting for a target.
        """
        properties = body["properties"]
        for profile in properties["profiles"]:
            low, default, high = (
                int(profile["capacity"][key]) for key in ("minimum", "default", "maximum")
            )
            texts = all(isinstance(value, str) for value in profile["capacity"].values())
            if not texts or not 0 < low <= default <= high or not body.get("location"):
                return refuse(400, "BadRequest", "The autoscale setting is not valid.")
        target = properties["targetResourceUri"].lower()
        others = [one for key, one in self.settings.items() if key != name]
        if any(one["properties"]["targetResourceUri"].lower() == target for one in others):
            return refuse(409, "Conflict", "Another autoscale setting has the same target.")
        created = name not in self.settings
        self.settings[name] = {"name": name, **body}
        return reply(201 if created else 200, self.settings[name])
