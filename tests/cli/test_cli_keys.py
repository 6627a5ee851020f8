"""`onnx-ops keys` over a project with a version under an alias."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, read_key
from onnx_ops.app.context import open_project
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.testing.registries import publication
from tests.release.release_parts import config_of
from tests.support.command import Result, run_command
from tests.support.extras import hide

TARGET = "cpu-1t"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "onnx-ops.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys(*arguments: str) -> Result:
    return run_command("keys", *arguments, cwd=Path())


def signing_key(project: Path) -> EcdsaSigner:
    return read_key(project / ".onnx-ops" / "keys" / "signing.pem")


def promoted(project: Path) -> str:
    """Return a version with a decision by the present key.

    It is the target's champion.
    """
    signer = signing_key(project)
    release = publication(project / "files", model="digits", seed="a")
    (variant,) = release.variants
    record = variant.signed[TARGET].record
    signed = sign_record(record, signer)
    context = open_project().context
    published = replace(release, variants=(replace(variant, signed={TARGET: signed}),))
    version = context.registry().publish(published)["fp32"]
    promote(context, "digits", version, TARGET)
    return version


def test_keys_rotate_keeps_old_key_trusted_in_list(project: Path) -> None:
    assert "No keys yet" in keys("list").stdout
    assert keys("new").code == 0
    old = signing_key(project).key
    assert keys("new").code == 2
    output = keys("rotate")
    assert output.code == 0
    assert f"decisions by key {short_digest(old)} stay valid" in output.stdout
    new = signing_key(project).key
    listed = keys("list").stdout.splitlines()[:2]
    assert [line.split()[:2] for line in listed] == [
        [short_digest(new), "signs"],
        [short_digest(old), "trusted"],
    ]
    document = keys("list", "--json").parsed()
    roles = ["gate", "release"]
    assert [(one["key"], one["signs"], one["roles"]) for one in document] == [
        (new, True, roles),
        (old, False, roles),
    ]


def test_keys_new_list_and_rotate_print_no_private_key(project: Path) -> None:
    words = ("new", "list", "rotate", "list --json", "new --out other.pem --json")
    outputs = "".join(
        f"{done.stdout}{done.stderr}" for done in (keys(*line.split()) for line in words)
    )
    assert "PRIVATE" not in outputs
    for secret in ((project / ".onnx-ops" / "keys" / "signing.pem"), project / "other.pem"):
        body = secret.read_text().splitlines()[1]
        assert body not in outputs


def test_keys_retire_reports_versions_that_lose_their_decision(project: Path) -> None:
    keys("new")
    old = signing_key(project).key
    version = promoted(project)
    assert keys("retire", short_digest(old)).code == 5
    keys("rotate")
    refused = keys("retire", short_digest(old))
    assert refused.code == 5
    assert f"digits/{version} as champion-{TARGET}" in refused.stderr
    foreseen = keys("retire", short_digest(old), "--dry-run", "--json").parsed()
    assert foreseen["retired"] is False
    assert foreseen["lost"] == [
        {"alias": f"champion-{TARGET}", "model": "digits", "version": version}
    ]
    assert short_digest(old) in keys("list").stdout.replace("retired", "")
    forced = keys("retire", short_digest(old), "--force")
    assert forced.code == 0
    assert f"loses its decision: digits/{version}" in forced.stdout
    assert f"{short_digest(old)}  retired" in keys("list").stdout


def test_keys_retire_with_force_needs_no_mlflow_package(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys("new")
    old = signing_key(project).key
    promoted(project)
    keys("rotate")
    hide(monkeypatch, "mlflow")
    refused = keys("retire", short_digest(old))
    assert (refused.code, "package mlflow is not installed" in refused.stderr) == (4, True)
    forced = keys("retire", short_digest(old), "--force")
    assert (forced.code, "package mlflow is not installed" in forced.stderr) == (0, True)
    assert f"{short_digest(old)}  retired" in keys("list").stdout


def test_keys_retire_keeps_earlier_ledger_entries_valid(project: Path) -> None:
    keys("new")
    old = signing_key(project)
    bind_endpoint(open_project().context, config_of("digits"), RolloutPolicy())
    keys("rotate")
    assert keys("retire", short_digest(old.key)).code == 0
    state = open_project().context.ledger.state("digits")
    assert (state.config, set(state.keys)) == (config_of("digits"), {signing_key(project).key})
    # The state is also read if the snapshot, the first file of the ledger, and the record of its
    # last entry are missing.
    folder = project / ".onnx-ops" / "ledger" / "digits"
    assert not (folder / "snapshot.json").exists()
    (folder / "00000001.jsonl").unlink()
    (project / ".onnx-ops" / "seen" / "digits.json").unlink()
    assert open_project().context.ledger.state("digits") == state


def test_keys_retire_of_unused_key_succeeds_once(project: Path) -> None:
    keys("new")
    old = signing_key(project).key
    keys("rotate")
    assert keys("retire", short_digest(old)).code == 0
    assert keys("retire", short_digest(old)).code == 2


def test_doctor_reports_trusted_keys_and_roles_without_key(project: Path) -> None:
    from onnx_ops.cli.diagnosis import diagnose

    keys("new")
    key = short_digest(signing_key(project).key)
    found = {one.check: one for one in diagnose(open_project())}
    assert found["signatures"].ok
    assert found["trusted keys"].found.startswith(
        f"decisions: {key}; ledger entries that need a key: {key}; "
    )
    folder = project / ".onnx-ops" / "keys"
    (folder / "gate").mkdir()
    for public in folder.glob("*.pub.pem"):
        public.rename(folder / "gate" / public.name)
    half = {one.check: one for one in diagnose(open_project())}["signatures"]
    assert half.ok
    assert f"not ledger entries that need a key: copy {folder}" in half.found
    for public in (folder / "gate").glob("*.pub.pem"):
        public.unlink()
    lost = {one.check: one for one in diagnose(open_project())}["signatures"]
    assert not lost.ok
    assert "Copy" in lost.remedy


@pytest.mark.parametrize("signing", ["auto", "off"])
def test_doctor_without_key_for_decisions_lists_ledger_keys_or_fails_if_signing_is_off(
    signing: str, project: Path
) -> None:
    from onnx_ops.cli.diagnosis import diagnose

    keys("new")
    key = short_digest(signing_key(project).key)
    (project / "onnx-ops.toml").write_text(f'signing = "{signing}"', encoding="utf-8")
    folder = project / ".onnx-ops" / "keys"
    (folder / "release").mkdir()
    for public in folder.glob("*.pub.pem"):
        public.rename(folder / "release" / public.name)
    finding = next(one for one in diagnose(open_project()) if one.check == "trusted keys")
    assert finding.ok is (signing == "auto")
    expected = {
        "auto": f"decisions: none; ledger entries that need a key: {key}; in {folder}",
        "off": "none for decisions: every promotion is refused",
    }
    assert finding.found == expected[signing]
