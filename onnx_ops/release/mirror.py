"""Makes the registry say what the ledger says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime

from onnx_ops.domain.ledger import Mirrored, Notified, Observed, Outcome, RefusedVersion, ReleaseState, Renewed
from onnx_ops.domain.rollout import alias
from onnx_ops.errors import NotFoundError, RefusedError
from onnx_ops.ports import Ports
from onnx_ops.release.decided import ToldRollback, rolled_back_tag
from onnx_ops.release.desired import moved_by_a_person, spent
from onnx_ops.release.journal import Journal, damage, siblings


def put_back(journal: Journal, refused: RefusedVersion) -> None:
    """Write a refusal down, restore the alias that asked for a version that may not serve, and say why on the version.

    A kill in between leaves a refusal without an outcome: the next call goes on with that one.
    """
    begun = journal.state.refusing
    if begun is None:
        journal.append(refused)
    config = journal.config
    registry = journal.ports.registry()
    if registry.aliases(config.model).get(refused.alias) == refused.version:  # a person may have been faster
        _restore(journal, refused)
    conclude_refusal(journal, refused)


def conclude_refusal(journal: Journal, refused: RefusedVersion) -> None:
    """Say on the version why it was refused, and in the ledger that the alias no longer asks for it."""
    with contextlib.suppress(NotFoundError):  # the version may be gone; then there is nothing to say it on
        said = {f"onnxops.rejected.{refused.alias}": refused.reason[:400]}
        journal.ports.registry().annotate(journal.config.model, refused.version, said)
    journal.append(Outcome(of=journal.state.refused_at, ok=True))


def _restore(journal: Journal, refused: RefusedVersion) -> None:
    model, registry = journal.config.model, journal.ports.registry()
    if refused.restored_to is not None:
        with contextlib.suppress(NotFoundError, RefusedError):  # what stood there before is gone too, or counts no more
            registry.set_alias(model, refused.alias, refused.restored_to)
            return
    registry.delete_alias(model, refused.alias)


def write_owed_aliases(journal: Journal) -> str:
    """Write the aliases that the ledger owes the registry; returns what was written, or nothing if it must wait.

    A champion is written once every endpoint of the model and target serves it. An alias that a person moved after
    the entry that owes it is left alone: `desired` takes it as a wish.

    Raises:
        ServiceUnavailableError, RefusedError: the registry does not answer, or refuses; what is owed stays owed.
    """
    state, config = journal.state, journal.config
    owed = dict(state.pending_aliases)
    champion = alias("champion", config.target)
    if not owed or not _agreed(journal, owed.get(champion)):
        return ""
    registry = journal.ports.registry()
    found = registry.aliases(config.model)
    # The champion last: while it is still the old one, the registry's server lets that become `previous`.
    for name, version in sorted(owed.items(), key=lambda item: item[0] == champion):
        if version is None:
            # A challenger that a person has set meanwhile is a wish.
            if name in found and (name != alias("challenger", config.target) or spent(journal, found[name])):
                registry.delete_alias(config.model, name)
        elif found.get(name) != version and not (name == champion and moved_by_a_person(state, name, found.get(name))):
            try:
                registry.set_alias(config.model, name, version)
            except NotFoundError:  # somebody deleted that version: the registry can say no more than it does
                owed[name] = found.get(name)
    note_mirrored(journal, owed)
    return ", ".join(f"{name} -> {version or 'none'}" for name, version in owed.items())


def tell_rejected(journal: Journal) -> bool:
    """Say on versions that were rolled back here why they do not come back by themselves, and no more on those that
    may. Until that is written down it is done again. Says whether there was anything to tell."""
    state, model, registry = journal.state, journal.config.model, journal.ports.registry()
    now = datetime.fromtimestamp(journal.ports.clock.now(), tz=UTC)
    for version in sorted(state.untold):
        why = state.why_rejected(state.known[version])
        text = "" if why is None else ToldRollback(at=now, why=why[:400]).text()
        with contextlib.suppress(NotFoundError):
            registry.annotate(model, version, {rolled_back_tag(state.endpoint): text})
    return bool(state.untold)


def take_note(journal: Journal, champion: str | None) -> bool:
    """Write down that the registry's champion is what serves here, although somebody else made it so.

    Without that, the alias would look moved by a person for ever, and outrank every later release.
    """
    state, name = journal.state, alias("champion", journal.config.target)
    serving = state.roles.stable
    if champion is None or serving is None or champion != serving.version:
        return False
    if name in state.pending_aliases or state.aliases.get(name) == champion:
        return False
    note_mirrored(journal, {name: champion})
    return True


def note_mirrored(journal: Journal, aliases: Mapping[str, str | None]) -> None:
    """Write down that the registry shows these aliases, and show it the ledger's entries, for people to read.

    What came after the last such note is shown before the next one is written: killed in between, it is shown again.
    Readings and renewals stay out, as there may be one a minute, and so does who was told.
    """
    config, shown = journal.config, max(journal.state.mirrored_at - 1, 0)

    def show(after: int) -> None:
        for entry in journal.ports.ledger.read(config.endpoint, after=after):
            if not isinstance(entry.body, Observed | Notified | Renewed):
                journal.ports.registry().mirror(entry, config.model)

    show(shown)
    show(journal.append(Mirrored(aliases=aliases)) - 1)


def _agreed(journal: Journal, champion: str | None) -> bool:
    """Whether every endpoint of this model and target serves the version that would become champion."""
    if champion is None:
        return True
    states = siblings(journal.ports, journal.config.model, journal.config.target)
    return all(_serves(journal.ports, state, champion) for state in states)


def _serves(ports: Ports, state: ReleaseState, version: str) -> bool:
    """Whether the endpoint serves this version to all. Where its ledger is damaged, it is asked itself."""
    if state.config is None or damage(ports, state.endpoint) is None:
        return state.roles.stable is not None and state.roles.stable.version == version
    actual = ports.provider(state.config.provider).observe(state.config)
    if actual is None:
        return False
    return {one.version for one in actual.deployments if actual.split.weights.get(one.name)} == {version}
