"""Commands about the keys that sign decisions and ledger entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    AsJson,
    add_command,
    make_group,
    open_project,
    print_json,
    print_result,
    say,
)
from onnx_ops.cli.dry_runs import NOTHING_CHANGED
from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.errors import NotFoundError, RefusedError, UserError

if TYPE_CHECKING:
    from onnx_ops.adapters.signers.keyring import Keyring
    from onnx_ops.config.settings import Settings
    from onnx_ops.ports import Context
    from onnx_ops.release.audit import Dependent

keys = make_group(
    "keys",
    "Create, rotate and retire the keys that sign decisions and ledger entries. Private keys are "
    "never printed.",
    "onnx-ops keys list",
)


@add_command(keys, "list")
def keys_list(as_json: AsJson = False) -> None:
    """List the keys: which one signs here, which are trusted, which are retired.

    Example: onnx-ops keys list
    """
    from onnx_ops.release.adoption import find_missing_key

    project = open_project()
    known = _keyring(project.settings).list_keys()
    missing = {
        k.key: find_missing_key(project.context, k.key) if "release" in k.roles else {}
        for k in known
    }
    if as_json:
        print_json(
            [
                {
                    "key": k.key,
                    "signs": k.signs,
                    "roles": k.roles,
                    "files": [str(path) for path in k.files],
                    "not_in_ledgers": missing[k.key],
                }
                for k in known
            ]
        )
        return
    for key in known:
        trusted = f"trusted for {' and '.join(key.roles)}"
        state = trusted if key.trusted else "NOT trusted" if key.signs else "retired"
        state = f"signs here, {state}" if key.signs else state
        say(f"{short_digest(key.key)}  {state:<42} {', '.join(path.name for path in key.files)}")
        for name, why in missing[key.key].items():
            say(f"  ledger {name} does not accept signatures of this key: {why}")
    if known:
        say(
            "A gate key signs decisions and overrides. A release key signs ledger entries that "
            "grant something, such as a binding,"
        )
        say("a start or a deletion. Aborts, pauses and rollbacks to granted versions need no key.")
    else:
        say(
            "No keys yet: `onnx-ops keys new` creates one. "
            'With signing = "auto", the first run does so too.'
        )


@add_command(keys, "new")
def keys_new(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File of the private key. Default: the signing key's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key pair, without replacing an existing one.

    The pair is a private key with mode 0600, and its public key.

    Example: onnx-ops keys new
    """
    from onnx_ops.adapters.signers.ecdsa import public_path

    path = out or _settings().signing_key
    key, public = _keyring().create(path).key, public_path(path)
    text = (
        f"key {short_digest(key)}: {path} (keep it secret), {public} (copy it to every machine "
        "that verifies)"
    )
    print_result(
        lambda: {"key": key, "private": str(path), "public": str(public)}, text, as_json=as_json
    )


@add_command(keys, "public")
def keys_public() -> None:
    """Print this machine's public key, for the trusted keys of other machines.

    Example: onnx-ops keys public > keys/release/reconciler.pub.pem
    """
    signer = _keyring().find_signer()
    if signer is None:
        raise NotFoundError(
            "this machine has no signing key", remedy="Create a key with `onnx-ops keys new`."
        )
    say(signer.public_pem().decode().strip())


@add_command(keys, "admit")
def keys_admit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Public key of the other machine, in PEM.")
    ],
    as_json: AsJson = False,
) -> None:
    """Permit another machine's key to sign in the ledgers.

    That machine can then start, advance and finish rollouts. The public key is copied to the
    trusted release keys here. In each ledger that lists its keys, a signed entry adds this key.
    Other machines read this entry, so nothing is copied to them. Decisions need a gate key: copy
    the public key into the folder `gate` of the trusted keys of every machine.

    Example: onnx-ops keys admit reconciler.pub.pem
    """
    from onnx_ops.release.adoption import admit_key

    project = open_project()
    admitted = _keyring(project.settings).trust(file, "release")
    changed = admit_key(project.context, admitted)
    (key,) = admitted
    text = (
        f"key {short_digest(key)} can sign in {len(changed)} more "
        f"ledger{'' if len(changed) == 1 else 's'}"
    )
    print_result(
        lambda: {"key": key, "changed": changed},
        ": ".join(filter(None, [text, ", ".join(changed)])),
        as_json=as_json,
    )


@add_command(keys, "rotate")
def keys_rotate(as_json: AsJson = False) -> None:
    """Sign with a new key from now on; old decisions stay valid.

    The old key admits the new key to the ledgers. The old public key stays trusted. The old private
    key is removed and cannot sign again.

    Example: onnx-ops keys rotate
    """
    from onnx_ops.release.adoption import admit_key

    project = open_project()
    keyring = _keyring(project.settings)
    signer = keyring.find_signer()
    by = None if signer is None else signer.key
    old, new_key = keyring.rotate(lambda admitted: admit_key(project.context, admitted, by=by))
    if as_json:
        print_json({"old": old, "new": new_key})
        return
    say(f"key {short_digest(new_key)} signs now; decisions by key {short_digest(old)} stay valid")
    say(
        f"  next: copy the public keys in {project.settings.trusted_keys} to every machine that "
        "verifies"
    )


@add_command(keys, "retire")
def keys_retire(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key, or its first digits.")],
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="ENDPOINT=N",
            help="For a stolen key: keep the entries of this ledger up to N, "
            "as `history` shows them. Repeatable.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Retire the key even if versions lose their decision, or if reading the registry "
            "or changing a ledger fails.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what the command would change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop trusting a key: for all decisions, and for new entries of ledgers.

    Entries of ledgers that the key has signed until now stay valid. After a theft, only those up to
    the entry that --keep names stay valid. The command refuses if versions under aliases or at
    endpoints would lose their decision, and lists them.

    Example: onnx-ops keys retire 3f2a91c07be4 --dry-run
    """
    project = open_project()
    keyring, last = (
        _keyring(project.settings),
        _parse_keep(keep or [], project.context.ledger.endpoints()),
    )
    known = keyring.find(key)
    keyring.require_retirable(known)
    lost = _list_dependents(project.context, known.key, force=force)
    names = [
        f"{version.model}/{version.version} "
        + (f"as {version.alias}" if version.alias else f"at endpoint {version.endpoint}")
        for version in lost
    ]
    if lost and not (force or dry_run):
        raise RefusedError(
            f"{len(lost)} version{'s' if len(lost) > 1 else ''} under aliases or at endpoints "
            "would lose the decision",
            where=f"key {short_digest(known.key)}",
            why=", ".join(names),
            remedy="For each version under an alias, check out the commit in its tag `git.sha`. "
            "Run `onnx-ops run FILE --no-cache gate --until register` there, which signs with the "
            "new key. A version that an override permits needs a new override. For each version at "
            "an endpoint, release another version, and wait for `scale_down_delay`. Or use "
            "--force: promotions and restarted servers then refuse the listed versions.",
        )
    archived: tuple[Path, ...] = ()
    if not dry_run:
        # The ledgers stop accepting the key before it is removed here. If the withdrawal fails, the
        # command can be repeated with the key.
        _withdraw_from_ledgers(project.context, known.key, last, force=force)
        archived = keyring.retire(known)
    if as_json:
        print_json({"key": known.key, "retired": not dry_run, "lost": codec.to_json(lost)})
        return
    for name in names:
        say(f"{'would lose' if dry_run else 'loses'} its decision: {name}")
    say(
        f"key {short_digest(known.key)} {'would no longer be' if dry_run else 'is no longer'} "
        "trusted"
    )
    for path in archived:
        say(f"  archived: {path}")
    if dry_run:
        say(NOTHING_CHANGED)


def _list_dependents(context: Context, key: Digest, *, force: bool) -> tuple[Dependent, ...]:
    """Return the versions under aliases and at endpoints that lose their decision.

    If the registry cannot be read, aliases are left out with `force`; otherwise raise the error.
    """
    from onnx_ops.release.audit import list_dependents, list_deployed_dependents
    from onnx_ops.release.registry_sync import REGISTRY_OUTAGES

    deployed = list_deployed_dependents(context, key)
    try:
        return (*list_dependents(context, key), *deployed)
    except REGISTRY_OUTAGES as error:
        # With --force, a stolen key can be retired even without the registry.
        if not force:
            raise
        say(f"the aliases whose versions lose their decision are unknown: {error}", err=True)
        return deployed


def _withdraw_from_ledgers(
    context: Context, key: Digest, keep: Mapping[str, int], *, force: bool
) -> None:
    """Stop accepting new entries by a key in all ledgers.

    With `force`, report the ledgers that fail. Otherwise, raise the error of the first.
    """
    from onnx_ops.release.adoption import withdraw_key

    _, errors = withdraw_key(context, key, keep=keep)
    for name, error in errors.items():
        if not force:
            raise error
        say(f"ledger {name} is unchanged: {error}", err=True)


def _parse_keep(options: list[str], endpoints: Collection[str]) -> dict[str, int]:
    """Return the last valid entry of each endpoint that `--keep` names."""
    keep = {}
    for option in options:
        name, _, number = option.partition("=")
        if name not in endpoints or not (number.isascii() and number.isdigit() and int(number)):
            known = ", ".join(sorted(endpoints)) or "none"
            raise UserError(
                f"{option!r} is not ENDPOINT=N",
                where="--keep",
                remedy=f"ENDPOINT is one of: {known}. N is a number from 1.",
            )
        keep[name] = int(number)
    return keep


def _settings() -> Settings:
    from onnx_ops.config.settings import load_settings

    return load_settings()


def _keyring(settings: Settings | None = None) -> Keyring:
    from onnx_ops.adapters.signers.keyring import Keyring

    settings = settings or _settings()
    remote = None
    if settings.signer:
        from onnx_ops.adapters.signers.remote import open_signer

        remote = open_signer(settings.signer)
    return Keyring(settings.signing_key, settings.trusted_keys, remote)
