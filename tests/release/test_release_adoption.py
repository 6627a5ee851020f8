"""Trust in the signatures of a ledger.

The tests cover trusted signers, a stolen key, and a damaged or unsigned ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.ledgers.chain import PAYLOAD_TYPE, ChainedEntry, LedgerKeys, decode, encode
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.attestation import TrustedKeys, sign_bytes
from onnx_ops.domain.ledger import (
    EndpointBound,
    EntryBody,
    LedgerAdopted,
    LedgerEntry,
    OperatorCommandSent,
    ReleaseState,
)
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import (
    CorruptStateError,
    LedgerConflictError,
    MissingKeyError,
    OnnxOpsError,
    RefusedError,
    StillPendingError,
    StorageError,
    UserError,
)
from onnx_ops.ports import Context
from onnx_ops.release.adoption import (
    Adoption,
    admit_key,
    adopt,
    find_adoption,
    find_missing_key,
    withdraw_key,
)
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import send_command, withdraw_request
from onnx_ops.release.status import HistoryFilter, read_history
from onnx_ops.testing.fakes import FakeSigner, FakeWorld
from tests.release.release_parts import Scene, roll_back
from tests.release.release_scenes import on_trial_in, serving
from tests.support.chains import MemoryObjects, append_raw

ENDPOINT = "digits"
RESUME = OperatorCommandSent(command=OperatorCommand.RESUME)
MAIN, OTHER, THIEF = FakeSigner(), FakeSigner(b"another machine"), FakeSigner(b"a thief")


def open_keys(signer: FakeSigner | None, *trusted: FakeSigner) -> LedgerKeys:
    """Return the keys of a machine: its own key, and those that it trusts."""
    public = {one.key: one.trusted_keys for one in trusted}
    verifier = TrustedKeys((), encoded=",".join(public.values()))
    return LedgerKeys(lambda: verifier, lambda: signer, lambda: public)


@pytest.mark.parametrize(
    ("signer", "admitted", "remedy"),
    [
        (None, (), 'Remove the setting `signing = "off"`'),
        (OTHER, (), "to the folder `release` of its trusted keys"),
        (OTHER, (MAIN,), "`onnx-ops keys admit FILE`"),
    ],
)
def test_ledger_keys_sign_without_valid_key_names_remedy_for_this_ledger(
    signer: FakeSigner | None, admitted: tuple[FakeSigner, ...], remedy: str
) -> None:
    keys = {one.key: one.trusted_keys for one in admitted}
    with pytest.raises(MissingKeyError) as caught:
        open_keys(signer, MAIN).sign(b"an entry", "begins start", "ledger digits", keys)
    assert remedy in caught.value.remedy
    assert "--no-cache gate" not in caught.value.why


class Site:
    """An endpoint whose ledger several machines open.

    `MAIN` has bound the endpoint. Version 2 serves, and version 3 is on trial.
    """

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.scene = Scene(
            world=FakeWorld(ledger=ObjectLedger(self.objects, open_keys(MAIN, MAIN)))
        )
        serving("a", "b", world=self.scene.world)
        on_trial_in(self.scene)

    def open(self, signer: FakeSigner | None, *trusted: FakeSigner) -> Context:
        """Return the context of a machine that has read nothing yet."""
        world = replace(
            self.scene.world, ledger=ObjectLedger(self.objects, open_keys(signer, *trusted))
        )
        return replace(world.context(f"machine {len(trusted)}"), signer=lambda: signer)

    def read(self, *trusted: FakeSigner) -> ReleaseState:
        return self.open(None, *trusted).ledger.state(ENDPOINT)

    @property
    def count(self) -> int:
        return self.open(None, MAIN).ledger.count(ENDPOINT)

    def forge(self, body: EntryBody, signer: FakeSigner) -> None:
        """Append an entry that only its signature distinguishes from an honest one."""
        names = sorted(name for name in self.objects.data if name.startswith(f"{ENDPOINT}/0"))
        previous = decode(ENDPOINT, len(names), self.objects.data[names[-1]]).digest
        entry = LedgerEntry(
            endpoint=ENDPOINT, sequence=len(names) + 1, at=0.0, actor="alice", body=body
        )
        data = encode(ChainedEntry(previous=previous, snapshot=None, entry=entry))
        signatures = codec.dumps(sign_bytes(PAYLOAD_TYPE, data, signer))
        self.objects.data[f"{ENDPOINT}/{entry.sequence:08d}.jsonl"] = data + b"\n" + signatures

    def damage(self, sequence: int) -> None:
        name = f"{ENDPOINT}/{sequence:08d}.jsonl"
        self.objects.data[name] = self.objects.data[name][:40]
        self.objects.data.pop(f"{ENDPOINT}/snapshot.json", None)


@pytest.fixture
def site() -> Site:
    return Site()


def test_bind_endpoint_first_entry_names_project_place_and_keys(site: Site) -> None:
    first = site.scene.world.ledger.read(ENDPOINT)[0].body
    assert isinstance(first, EndpointBound)
    assert first.origin is not None
    assert (first.origin.place, dict(first.origin.keys)) == (
        "/nowhere",
        {MAIN.key: MAIN.trusted_keys},
    )
    assert first.origin.project == site.scene.context.root.resolve().name


def test_send_command_with_unadmitted_key_raises_missing_key_error_and_writes_nothing(
    site: Site,
) -> None:
    other, before = site.open(OTHER, MAIN, OTHER), dict(site.objects.data)
    with pytest.raises(MissingKeyError, match="orders to advance") as caught:
        send_command(other, ENDPOINT, OperatorCommand.ADVANCE)
    assert "keys admit" in caught.value.remedy
    assert site.objects.data == before
    assert list(find_missing_key(other, OTHER.key)) == [ENDPOINT]
    assert find_missing_key(other, MAIN.key) == {}


def test_admit_key_makes_its_entries_readable_to_other_machines(site: Site) -> None:
    assert admit_key(site.scene.context, {OTHER.key: OTHER.trusted_keys}) == (ENDPOINT,)
    assert admit_key(site.scene.context, {OTHER.key: OTHER.trusted_keys}) == ()
    other = site.open(OTHER, MAIN, OTHER)
    send_command(other, ENDPOINT, OperatorCommand.ADVANCE)
    reconcile_until_stable(other, ENDPOINT)
    # A third machine has only the first key.
    assert site.read(MAIN) == other.ledger.state(ENDPOINT)
    assert site.read(MAIN).command is None or site.read(MAIN).roles.step > 0
    assert find_missing_key(other, OTHER.key) == {}


def test_roll_back_with_unadmitted_key_succeeds(site: Site) -> None:
    assert (
        roll_back(site.open(OTHER, MAIN, OTHER), ENDPOINT, candidate_only=True).moved_from == "v3"
    )
    assert site.read(MAIN).roles.candidate is None


def rotate(site: Site) -> Context:
    """Replace the key of `MAIN` by that of `OTHER`.

    Return the context of the machine that only has the new key.
    """
    admit_key(site.scene.context, {OTHER.key: OTHER.trusted_keys})
    changed, errors = withdraw_key(site.open(OTHER, MAIN, OTHER), MAIN.key)
    assert (list(changed), errors) == ([ENDPOINT], {})
    return site.open(OTHER, OTHER)


def test_withdraw_key_preserves_state_for_machines_without_that_key(site: Site) -> None:
    before = site.scene.state()
    state = rotate(site).ledger.state(ENDPOINT)
    kept = replace(state, head=before.head, keys=before.keys, adopted=0)
    assert kept == before
    assert set(state.keys) == {OTHER.key}
    # The chain leads back from the new key's entry to the first entry.
    assert [one.sequence for one in site.open(None, OTHER).ledger.read(ENDPOINT)] == list(
        range(1, state.head + 1)
    )
    for name in (f"{ENDPOINT}/snapshot.json", f"{ENDPOINT}/00000001.jsonl"):
        site.objects.data.pop(name, None)
    assert site.read(OTHER) == state


def test_entry_by_withdrawn_key_is_refused_even_where_key_is_trusted(site: Site) -> None:
    rotate(site)
    with pytest.raises(MissingKeyError):
        send_command(site.open(MAIN, MAIN), ENDPOINT, OperatorCommand.ADVANCE)
    site.forge(RESUME, MAIN)
    for trusted in ((OTHER,), (MAIN,), (MAIN, OTHER)):
        with pytest.raises(CorruptStateError, match="is not trusted"):
            site.read(*trusted)


def test_adoption_by_withdrawn_key_counts_only_where_key_is_trusted(site: Site) -> None:
    state = rotate(site).ledger.state(ENDPOINT)
    site.forge(LedgerAdopted(keys={MAIN.key: MAIN.trusted_keys}, state=state), MAIN)
    with pytest.raises(CorruptStateError, match="is not trusted"):
        site.read(OTHER)
    assert set(site.read(MAIN, OTHER).keys) == {MAIN.key}


def test_withdraw_or_admit_key_by_unadmitted_machine_writes_nothing(site: Site) -> None:
    before = dict(site.objects.data)
    _, errors = withdraw_key(site.open(OTHER, MAIN, OTHER), MAIN.key)
    assert isinstance(errors[ENDPOINT], MissingKeyError)
    with pytest.raises(MissingKeyError):
        admit_key(site.open(OTHER, MAIN, OTHER), {OTHER.key: OTHER.trusted_keys})
    assert (
        admit_key(site.open(OTHER, MAIN, OTHER), {OTHER.key: OTHER.trusted_keys}, by=OTHER.key)
        == ()
    )
    assert site.objects.data == before


def test_withdraw_key_for_last_key_is_refused(site: Site) -> None:
    before = dict(site.objects.data)
    _, errors = withdraw_key(site.scene.context, MAIN.key)
    assert isinstance(errors[ENDPOINT], RefusedError)
    assert site.objects.data == before


def steal(site: Site) -> int:
    """Let a thief with the key of `MAIN` send a command and lift a rejection.

    Return the last honest entry.
    """
    roll_back(site.scene.context, ENDPOINT, candidate_only=True)
    site.scene.reconcile()
    last = site.count
    site.forge(RESUME, MAIN)
    admit_key(site.open(MAIN, MAIN), {THIEF.key: THIEF.trusted_keys})
    state = site.read(MAIN)
    site.forge(
        LedgerAdopted(keys={THIEF.key: THIEF.trusted_keys}, state=replace(state, rejected={})), MAIN
    )
    site.forge(RESUME, THIEF)
    assert not site.read(MAIN).rejected
    return last


def test_withdraw_key_that_was_stolen_discards_entries_of_thief(site: Site) -> None:
    last = steal(site)
    owner = site.open(OTHER, MAIN, OTHER)
    changed, errors = withdraw_key(owner, MAIN.key, keep={ENDPOINT: last}, reason="stolen")
    assert (changed, errors) == ({ENDPOINT: last + 5}, {})
    for trusted in ((OTHER,), (MAIN, OTHER)):
        state = site.read(*trusted)
        assert (state.head, state.adopted) == (last + 5, last + 5)
        assert MAIN.key not in state.keys
        assert THIEF.key not in state.keys
        assert len(state.rejected) == 1
    site.forge(RESUME, THIEF)
    with pytest.raises(CorruptStateError, match="is not trusted"):
        site.read(OTHER)


def test_reconcile_after_withdrawal_of_stolen_key_keeps_traffic_and_history(site: Site) -> None:
    last = steal(site)
    owner = site.open(OTHER, MAIN, OTHER)
    before, _ = read_history(owner, HistoryFilter(endpoints=(ENDPOINT,)))
    withdraw_key(owner, MAIN.key, keep={ENDPOINT: last})
    after = site.open(OTHER, OTHER)
    reconcile_until_stable(after, ENDPOINT)
    assert site.scene.traffic()["v2"] == 100
    lines, errors = read_history(after, HistoryFilter(endpoints=(ENDPOINT,)))
    assert not errors
    assert lines[-1].sequence == site.count
    honest = [line for line in before if line.sequence <= last]
    assert honest
    assert [line for line in lines if line.sequence <= last] == honest
    assert any(line.kind == "ledger-adopted" for line in lines)


def test_adopt_damaged_ledger_continues_rollback_from_last_intact_state(site: Site) -> None:
    last = site.count
    roll_back(site.scene.context, ENDPOINT, candidate_only=True)
    site.damage(last + 2)
    operator = site.open(MAIN, MAIN)
    with pytest.raises(CorruptStateError, match="not JSON") as caught:
        roll_back(operator, ENDPOINT)
    assert "onnx-ops ledger adopt" in caught.value.remedy
    adoption = find_adoption(operator, ENDPOINT)
    assert (adoption.state.head, adoption.count) == (last + 1, site.count)
    assert "not JSON" in adoption.damage
    adopt(operator, adoption, reason="disk")
    assert site.read(MAIN).pending_rollback is not None
    fresh = site.open(MAIN, MAIN)
    reconcile_until_stable(fresh, ENDPOINT)
    assert site.scene.traffic()["v2"] == 100
    assert roll_back(fresh, ENDPOINT, to="1").moved_to == "v1"
    reconcile_until_stable(fresh, ENDPOINT)
    assert site.scene.record("3").tags["onnxops.rolled-back.digits"]
    assert site.read(MAIN) == fresh.ledger.state(ENDPOINT)
    sequences = [entry.sequence for entry in site.open(None, MAIN).ledger.read(ENDPOINT)]
    assert sequences == [*range(1, last + 2), *range(adoption.count + 1, site.count + 1)]


def test_adopt_with_damage_before_snapshot_keeps_present_state_and_makes_ledger_readable(
    site: Site,
) -> None:
    before, snapshot = site.read(MAIN), site.objects.data[f"{ENDPOINT}/snapshot.json"]
    site.damage(1)
    site.objects.data[f"{ENDPOINT}/snapshot.json"] = snapshot
    operator = site.open(MAIN, MAIN)
    with pytest.raises(CorruptStateError, match="not JSON"):
        operator.ledger.read(ENDPOINT)
    adoption = find_adoption(operator, ENDPOINT)
    assert (adoption.state, adoption.count) == (before, before.head)
    assert "not JSON" in adoption.damage
    adopt(operator, adoption)
    assert site.read(MAIN).roles == before.roles
    assert site.open(None, MAIN).ledger.read(ENDPOINT)[-1].sequence == before.head + 1


def test_find_adoption_with_last_after_missing_entry_raises_user_error(site: Site) -> None:
    count = site.count
    del site.objects.data[f"{ENDPOINT}/{count - 2:08d}.jsonl"]
    site.objects.data.pop(f"{ENDPOINT}/snapshot.json", None)
    operator = site.open(MAIN, MAIN)
    missing = f"entry {count - 1} is missing or unreadable"
    with pytest.raises(UserError, match=missing) as caught:
        find_adoption(operator, ENDPOINT, last=count - 1)
    assert caught.value.remedy == f"Readable entries: 1 to {count - 3}."
    assert adopt(operator, find_adoption(operator, ENDPOINT, last=count - 3)) == count + 1
    assert site.read(MAIN).adopted == count + 1


@pytest.mark.parametrize("starts_at_a_snapshot", [False, True])
def test_adopt_after_damage_of_already_read_entry_succeeds(
    site: Site, tmp_path: Path, starts_at_a_snapshot: bool
) -> None:
    seen = ObjectLedger(site.objects, open_keys(MAIN, MAIN), tmp_path).state(ENDPOINT)
    site.damage(seen.head)
    operator = site.open(MAIN, MAIN)
    adopt(operator, find_adoption(operator, ENDPOINT))
    if starts_at_a_snapshot:
        roll_back(site.open(MAIN, MAIN), ENDPOINT, candidate_only=True)
        reconcile_until_stable(site.open(MAIN, MAIN), ENDPOINT)
        assert f"{ENDPOINT}/snapshot.json" in site.objects.data
    assert (
        ObjectLedger(site.objects, open_keys(MAIN, MAIN), tmp_path).state(ENDPOINT).adopted
        == seen.head + 1
    )


def test_adopt_of_older_backup_is_detected_by_machine_with_newer_state(
    site: Site, tmp_path: Path
) -> None:
    backup = dict(site.objects.data)
    roll_back(site.scene.context, ENDPOINT, candidate_only=True)
    ObjectLedger(site.objects, open_keys(MAIN, MAIN), tmp_path).state(ENDPOINT)
    site.objects.data = backup
    site.damage(site.count)
    operator = site.open(MAIN, MAIN)
    adopt(operator, find_adoption(operator, ENDPOINT))
    with pytest.raises(CorruptStateError, match="the ledger lost entries"):
        ObjectLedger(site.objects, open_keys(MAIN, MAIN), tmp_path).state(ENDPOINT)


def test_adopt_after_lost_rollback_keeps_rolled_back_tag_in_registry(site: Site) -> None:
    last = site.count
    roll_back(site.scene.context, ENDPOINT, candidate_only=True)
    site.scene.reconcile()
    for sequence in range(last + 1, site.count + 1):
        site.damage(sequence)
    operator = site.open(MAIN, MAIN)
    adopt(operator, find_adoption(operator, ENDPOINT))
    assert not site.read(MAIN).rejected
    with suppress(OnnxOpsError):
        reconcile_until_stable(site.open(MAIN, MAIN), ENDPOINT)
    assert site.scene.record("3").tags["onnxops.rolled-back.digits"]


def test_find_adoption_of_unsigned_ledger_requires_signed_false(site: Site) -> None:
    before = site.scene.state()
    for name, data in site.objects.data.items():
        site.objects.data[name] = data.partition(b"\n")[0]
    site.objects.data.pop(f"{ENDPOINT}/snapshot.json", None)
    operator = site.open(MAIN, MAIN)
    assert find_adoption(operator, ENDPOINT).state.head == 0
    adoption = find_adoption(operator, ENDPOINT, signed=False)
    assert (adoption.state, adoption.count) == (before, before.head)
    assert "has no signature" in adoption.damage
    adopt(operator, adoption)
    state = site.read(MAIN)
    assert (state.roles, state.config, set(state.keys)) == (before.roles, before.config, {MAIN.key})


def test_adopt_without_trusted_key_is_refused(site: Site) -> None:
    site.damage(site.count)
    before = dict(site.objects.data)
    for signer, trusted in ((None, (MAIN,)), (THIEF, (MAIN,)), (OTHER, (MAIN,))):
        operator = site.open(signer, *trusted)
        with pytest.raises(MissingKeyError, match="sets the state"):
            adopt(operator, find_adoption(operator, ENDPOINT))
    assert site.objects.data == before


def test_roll_back_without_key_after_removal_of_damaged_entry_succeeds(site: Site) -> None:
    site.damage(site.count)
    del site.objects.data[f"{ENDPOINT}/{site.count:08d}.jsonl"]
    assert roll_back(site.open(None, MAIN), ENDPOINT, candidate_only=True).moved_from == "v3"


@pytest.mark.parametrize("point", ["before", "after", "snapshot"])
def test_adopt_after_kill_can_be_repeated(site: Site, point: str) -> None:
    site.damage(site.count)
    operator = site.open(MAIN, MAIN)
    site.objects.crash = point
    with pytest.raises(StorageError, match="killed"):
        adopt(operator, find_adoption(operator, ENDPOINT))
    again = site.open(MAIN, MAIN)
    with pytest.raises(CorruptStateError):
        again.ledger.state(ENDPOINT)
    adoption = find_adoption(again, ENDPOINT)
    adopt(again, adoption)
    assert site.read(MAIN).roles == adoption.state.roles
    roll_back(site.open(MAIN, MAIN), ENDPOINT, candidate_only=True)


def test_adopt_after_adoption_by_other_process_raises_ledger_conflict_error(site: Site) -> None:
    site.damage(site.count)
    operators = site.open(MAIN, MAIN), site.open(MAIN, MAIN)
    adoptions = [find_adoption(one, ENDPOINT) for one in operators]
    adopt(operators[0], adoptions[0])
    with pytest.raises(LedgerConflictError):
        adopt(operators[1], adoptions[1])


def adopt_unsigned(site: Site, state: ReleaseState) -> None:
    append_raw(
        site.objects, ENDPOINT, LedgerAdopted(keys={THIEF.key: THIEF.trusted_keys}, state=state)
    )


def adopt_by_thief(site: Site, state: ReleaseState) -> None:
    site.forge(LedgerAdopted(keys={THIEF.key: THIEF.trusted_keys}, state=state), THIEF)


def admit_by_thief(site: Site, state: ReleaseState) -> None:
    site.forge(LedgerAdopted(keys={THIEF.key: THIEF.trusted_keys, **state.keys}), THIEF)


@pytest.mark.parametrize("attack", [adopt_unsigned, adopt_by_thief, admit_by_thief])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_forged_adoption_raises_corrupt_state_error(
    site: Site, attack: Callable[[Site, ReleaseState], None], is_damaged: bool
) -> None:
    roll_back(site.scene.context, ENDPOINT, candidate_only=True)
    state = replace(site.scene.state(), rejected={}, keys={})
    if is_damaged:
        site.damage(site.count - 1)
    attack(site, state)
    site.objects.data[f"{ENDPOINT}/adopted.json"] = codec.dumps(site.count)
    with pytest.raises(CorruptStateError):
        site.read(MAIN)


@pytest.mark.parametrize("pointer", [b"", b"{}", b"7", b"-1", b"1e9", b"99999999", b"true"])
def test_forged_adoption_pointer_raises_corrupt_state_error(site: Site, pointer: bytes) -> None:
    """Forge the pointer to the last of two adoptions.

    The second adoption follows a rollback and a damaged entry. A pointer to the first one must not
    undo the rollback.
    """
    operator = site.open(MAIN, MAIN)
    adopt(operator, Adoption(state=site.read(MAIN), count=site.count, damage=""))
    first = site.count
    fresh = Scene(
        world=replace(site.scene.world, ledger=ObjectLedger(site.objects, open_keys(MAIN, MAIN)))
    )
    roll_back(fresh.context, ENDPOINT, candidate_only=True)
    state = site.read(MAIN)
    rejected = state.rejected
    assert rejected
    site.damage(first + 1)
    adopt(site.open(MAIN, MAIN), Adoption(state=state, count=site.count, damage="x"))
    assert site.read(MAIN).rejected == rejected
    for forged in (pointer, codec.dumps(first)):
        site.objects.data[f"{ENDPOINT}/adopted.json"] = forged
        with pytest.raises(CorruptStateError):
            site.read(MAIN)


def test_withdraw_request_after_key_rotation_requires_current_key(site: Site) -> None:
    rotate(site)
    site.scene.world.provider.down = True
    new = site.open(OTHER, OTHER)
    with pytest.raises(StillPendingError):
        roll_back(new, ENDPOINT, candidate_only=True)
    with pytest.raises(MissingKeyError, match="withdraws a request"):
        withdraw_request(site.open(MAIN, MAIN, OTHER), ENDPOINT, reason="no")
    assert site.read(OTHER).pending_rollback is not None
    withdraw_request(site.open(OTHER, OTHER), ENDPOINT, reason="no")
    assert site.read(OTHER).pending_rollback is None
