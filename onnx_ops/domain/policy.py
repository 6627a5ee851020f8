"""Who may move which alias, and who may override."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from annotated_types import MinLen, doc

ANYONE = "*"
"""Stands for every user, and for a user whom the server does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRule:
    """One line of a promotion policy."""

    aliases: Annotated[str, MinLen(1), doc("Aliases it is about; `*` and `?` as in names of files.")]
    users: Annotated[tuple[str, ...], MinLen(1), doc("Who may set or delete them; `*` is anyone.")]
    models: Annotated[str, MinLen(1), doc("Registered models it is about; `*` and `?` as in names of files.")] = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionPolicy:
    """Rules from top to bottom: the first that is about a model and alias decides."""

    schema: int = 1
    rules: Annotated[tuple[AliasRule, ...], MinLen(1), doc("The first rule that is about an alias decides.")]
    overrides: Annotated[tuple[str, ...], doc("Who may override a gate, with a reason; `*` is anyone.")] = ()

    def rule(self, model: str, alias: str) -> int | None:
        """Index of the rule that decides; None if none is about this alias."""
        for index, rule in enumerate(self.rules):
            if fnmatchcase(model, rule.models) and fnmatchcase(alias, rule.aliases):
                return index
        return None

    def names(self) -> frozenset[str]:
        """Every user whom the policy names."""
        return frozenset(self._users()) - {ANYONE}

    def _users(self) -> Iterator[str]:
        for rule in self.rules:
            yield from rule.users
        yield from self.overrides


def is_among(user: str, users: tuple[str, ...]) -> bool:
    """Whether the user, empty if not known, is one of these."""
    return ANYONE in users or (user != "" and user in users)
