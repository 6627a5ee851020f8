"""Settings: one file with profiles, then the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.config.settings import (
    FILE,
    NotifierConfig,
    Settings,
    find_root,
    load_settings,
    to_environ,
)
from onnx_ops.errors import UserError


def load(folder: Path, text: str | None = None, **environ: str) -> Settings:
    if text is not None:
        (folder / FILE).write_text(text, encoding="utf-8")
    return load_settings(folder, environ)


def test_load_settings_without_file_uses_state_folder(tmp_path: Path) -> None:
    settings = load(tmp_path)
    state = tmp_path / ".onnx-ops"
    assert (settings.root, settings.state, settings.profile) == (tmp_path, state, "default")
    assert (settings.store, settings.ledger) == (str(state / "store"), str(state / "ledger"))
    assert settings.tracking_uri == f"sqlite:///{state}/mlflow.db"
    assert settings.signing_key == state / "keys" / "signing.pem"
    assert settings.trusted_keys == settings.signing_key.parent
    assert settings.shared_targets is None
    assert not state.exists()


def test_load_settings_with_relative_paths_resolves_them_against_root(tmp_path: Path) -> None:
    settings = load(
        tmp_path, "store = 's3://bucket/store'\nledger = 'shared/ledger'\nstate = '/var/onnx-ops'\n"
    )
    assert settings.store == "s3://bucket/store"
    assert settings.ledger == str(tmp_path / "shared" / "ledger")
    assert settings.state == Path("/var/onnx-ops")
    assert settings.endpoints == Path("/var/onnx-ops/endpoints")
    keys = load(tmp_path, "signing_key = 'secrets/release.pem'\n")
    assert keys.trusted_keys == keys.signing_key.parent == tmp_path / "secrets"


PROFILES = """
tracking_uri = "http://base"
signing = "off"
[profiles.prod]
tracking_uri = "http://prod"
"""


def test_load_settings_with_profile_overrides_file(tmp_path: Path) -> None:
    assert load(tmp_path, PROFILES).tracking_uri == "http://base"
    prod = load(tmp_path, PROFILES, ONNX_OPS_PROFILE="prod")
    assert (prod.tracking_uri, prod.signing, prod.profile) == ("http://prod", "off", "prod")


def test_load_settings_with_profile_named_in_file_uses_it(tmp_path: Path) -> None:
    assert load(tmp_path, 'profile = "prod"\n' + PROFILES).tracking_uri == "http://prod"


def test_load_settings_with_profile_variable_ignores_profile_named_in_file(tmp_path: Path) -> None:
    (tmp_path / "onnx-ops.toml").write_text('profile = "prod"\n' + PROFILES, encoding="utf-8")
    assert load(tmp_path, ONNX_OPS_PROFILE="default").tracking_uri == "http://base"


def test_load_settings_with_environment_variable_overrides_profile(tmp_path: Path) -> None:
    settings = load(
        tmp_path, PROFILES, ONNX_OPS_PROFILE="prod", ONNX_OPS_TRACKING_URI="http://environ"
    )
    assert settings.tracking_uri == "http://environ"


def test_load_settings_with_unknown_profile_names_existing_profiles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'test'") as caught:
        load(tmp_path, PROFILES, ONNX_OPS_PROFILE="test")
    assert "prod" in caught.value.remedy


def test_load_settings_with_unknown_key_suggests_similar_key_or_lists_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'traking_uri'") as caught:
        load(tmp_path, "traking_uri = 'http://x'\n")
    assert "did you mean 'tracking_uri'?" in str(caught.value)
    with pytest.raises(UserError) as caught:
        load(tmp_path, "[profiles.prod]\nqqq = '1'\n", ONNX_OPS_PROFILE="prod")
    assert "signing_key" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "state = ",
        "profiles = 3",
        "[profiles]\nprod = 1",
        "state = 5",
        "state = ['a']",
        "[state]\na = 1",
        "signing = 'maybe'",
    ],
)
def test_load_settings_of_invalid_file_raises_user_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert FILE in caught.value.where


def test_load_settings_of_binary_file_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"state = '\xff'")
    with pytest.raises(UserError, match="not TOML"):
        load(tmp_path)


def test_find_root_prefers_settings_file_then_targets_folder_then_start(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_root(inner) == inner
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    assert find_root(inner) == tmp_path
    (tmp_path / "a" / "configs" / "targets").mkdir(parents=True)
    assert find_root(inner) == tmp_path / "a"
    (tmp_path / FILE).touch()
    assert find_root(inner) == tmp_path


def test_to_environ_preserves_settings(tmp_path: Path) -> None:
    settings = load(tmp_path, PROFILES + "ledger = 's3://bucket/ledger'\n", ONNX_OPS_PROFILE="prod")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert load_settings(elsewhere, to_environ(settings)) == settings
    plain = load_settings(elsewhere, {})
    assert load_settings(tmp_path, to_environ(plain)) == plain


NOTIFY = """
notify = [
  "webhook",
  {notifier = "github", options = {issue = 12, repository = "acme/models"}},
]
"""


def test_load_settings_reads_notifiers_with_options(tmp_path: Path) -> None:
    settings = load(tmp_path, NOTIFY)
    assert settings.notify == (
        NotifierConfig(notifier="webhook"),
        NotifierConfig(notifier="github", options={"issue": 12, "repository": "acme/models"}),
    )
    assert [entry.label for entry in settings.notify] == [
        "webhook",
        "github(issue=12, repository=acme/models)",
    ]
    assert isinstance(hash(settings), int)
    assert load(tmp_path, **to_environ(settings)) == settings


@pytest.mark.parametrize(
    ("text", "names"),
    [("", []), ("webhook", ["webhook"]), ("webhook, other,webhook", ["webhook", "other"])],
)
def test_load_settings_reads_names_of_notifiers(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    for settings in (load(tmp_path, f"notify = '{text}'"), load(tmp_path, ONNX_OPS_NOTIFY=text)):
        assert [entry.label for entry in settings.notify] == names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("notify = {notifier = 'webhook'}", "notify: expected a list"),
        ("notify = [{notifer = 'webhook'}]", "unknown key 'notifer'; did you mean 'notifier'?"),
        ("notify = [{notifier = 'github', with = {}}]", "unknown key 'with'"),
        ("notify = '[{]'", "not JSON"),
    ],
)
def test_load_settings_with_wrong_notifiers_raises_user_error(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["production", "prodction"])
def test_load_settings_without_file_rejects_profile_other_than_default(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=f"profile '{name}' was not found: the settings file"):
        load(tmp_path, ONNX_OPS_PROFILE=name)
    assert load(tmp_path, ONNX_OPS_PROFILE="default").profile == "default"
