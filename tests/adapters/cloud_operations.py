"""The operations of an endpoint in a cloud, and the requests of each to the control plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.adapters.fleet_site import AzureFleet, FleetSite, SageMakerFleet, with_options

CHANGING = ("Create", "Update", "Delete", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCalls:
    """The requests of one operation to the control plane, in order."""

    calls: tuple[str, ...]

    @property
    def changes(self) -> int:
        """Number of the requests that change something."""
        return sum(call.startswith(CHANGING) for call in self.calls)

    @property
    def first_change(self) -> int:
        """Position of the first change among the requests, from 1; 0 without a change."""
        positions = (n for n, call in enumerate(self.calls, 1) if call.startswith(CHANGING))
        return next(positions, 0)


def perform_operations(site: FleetSite) -> Mapping[str, OperationCalls]:
    """Perform every operation once, from the creation to the removal; return its requests."""
    provider = site.provider

    def change_image() -> None:
        with_options(site, image=f"{site.config.options['image']}-new")
        site.apply(5, blue=100)

    def delete_orphans() -> None:
        for orphan in provider.list_orphans(site.config, frozenset()):
            provider.delete_orphan(site.config, orphan)

    operations: Mapping[str, Callable[[], object]] = {
        "create": lambda: site.apply(1, blue=100),
        "start": lambda: site.apply(2, blue=90, green=10),
        "step": lambda: site.apply(3, blue=50, green=50),
        "observe": lambda: provider.observe(site.config),
        "rollback": lambda: provider.roll_back(site.config, site.state(blue=100), generation=4),
        "repeated rollback": lambda: provider.roll_back(
            site.config, site.state(blue=100), generation=4
        ),
        "change of options": change_image,
        "orphans": delete_orphans,
        "doctor": lambda: list(provider.diagnose({site.name: site.config.options})),
        "removal": lambda: provider.remove(site.config),
    }
    performed = {}
    for name, operation in operations.items():
        before = len(_list_calls(site))
        operation()
        performed[name] = OperationCalls(calls=tuple(_list_calls(site)[before:]))
    return performed


def _list_calls(site: FleetSite) -> Sequence[str]:
    """Return the requests to the control plane, without those to the storage."""
    if isinstance(site, SageMakerFleet):
        return [
            name.removeprefix("SageMaker.").removeprefix("POST / ")
            for name in site.fake.calls()
            if name.startswith(("SageMaker.", "POST / "))
        ]
    assert isinstance(site, AzureFleet)
    return [
        f"{method} {path}" for method, path in site.cloud.calls if not path.startswith("/blobs/")
    ]
