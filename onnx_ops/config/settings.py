"""Settings from one source: `onnx-ops.toml` with profiles, then environment variables `ONNX_OPS_*`."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from onnx_ops.errors import UserError

FILE = "onnx-ops.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where state lives and how services are reached. Every default is below `state`.

    `targets` is a folder of target files that several projects share, or empty. `store` and `ledger` are paths or
    fsspec URLs; `tracking_uri` is MLflow's, and `mlflow_url` where people open its
    pages if that is another address. `signing` is `auto` (the key file is
    made on first use), `required` (it must exist) or `off` (runs stop at the gates). `trusted_keys` is a folder of
    public keys; the signer's own is always trusted where signing is on. `notify` names the ways to reach people, with
    commas between: `webhook, github:owner/repository, prefect:TYPE/NAME`.
    """

    root: Path
    profile: str
    state: Path
    targets: str
    store: str
    ledger: str
    tracking_uri: str
    mlflow_url: str
    artifacts: str
    signing: str
    signing_key: Path
    trusted_keys: Path
    notify: str

    @property
    def notifiers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for part in map(str.strip, self.notify.split(",")) if part))

    @property
    def endpoints(self) -> Path:
        return self.state / "endpoints"

    @property
    def models(self) -> Path:
        return self.state / "models"

    @property
    def environments(self) -> Path:
        return self.state / "environments"

    @property
    def claims(self) -> Path:
        return self.state / "claims"

    @property
    def webhook_secret(self) -> Path:
        return self.state / "webhook.secret"

    @property
    def shared_targets(self) -> Path | None:
        """Folder of target files that several projects share, if there is one."""
        return Path(self.targets) if self.targets else None


_KEYS = (
    "state",
    "targets",
    "store",
    "ledger",
    "tracking_uri",
    "mlflow_url",
    "artifacts",
    "signing",
    "signing_key",
    "trusted_keys",
    "notify",
)
_SIGNING = ("auto", "required", "off")


def find_root(start: Path) -> Path:
    """The project's root: the nearest folder above `start` with `onnx-ops.toml`, else with `configs/`, else `start`."""
    start = start.resolve()
    folders = (start, *start.parents)
    for folder in folders:
        if (folder / FILE).is_file():
            return folder
    for folder in folders:
        if (folder / "configs" / "targets").is_dir():
            return folder
    return start


def load_settings(start: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of the project around `start` (the working directory by default).

    Raises:
        UserError: the file is not TOML, or a key, profile or value is not known.
    """
    environ = os.environ if environ is None else environ
    root = Path(environ["ONNX_OPS_ROOT"]).resolve() if "ONNX_OPS_ROOT" in environ else find_root(start or Path.cwd())
    values, profile = _from_file(root / FILE, environ.get("ONNX_OPS_PROFILE"))
    for key in _KEYS:
        if (text := environ.get(f"ONNX_OPS_{key.upper()}")) is not None:
            values[key] = text
    return _complete(root, profile, values)


def to_environ(settings: Settings) -> dict[str, str]:
    """Environment variables that give a child process the same settings."""
    environ = {f"ONNX_OPS_{key.upper()}": str(getattr(settings, key)) for key in _KEYS}
    return {**environ, "ONNX_OPS_ROOT": str(settings.root), "ONNX_OPS_PROFILE": settings.profile}


def _from_file(path: Path, asked: str | None) -> tuple[dict[str, str], str]:
    if not path.is_file():
        return {}, asked or "default"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError("not TOML", where=str(path), why=str(error)) from error
    profiles: Any = document.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(values, dict) for values in profiles.values()):
        raise UserError("profiles must be tables", where=str(path), remedy="Write each one as [profiles.NAME].")
    profile = asked or str(document.pop("profile", "default"))
    document.pop("profile", None)
    if profile not in profiles and profile != "default":
        known = ", ".join(sorted(profiles)) or "none"
        raise UserError(f"no profile is called {profile!r}", where=str(path), remedy=f"Profiles there: {known}.")
    values = {**document, **profiles.get(profile, {})}
    for key, value in values.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(_KEYS)}."
            raise UserError(f"unknown key {key!r}", where=str(path), remedy=hint)
        if not isinstance(value, str):
            raise UserError(f"{key} must be text, not {value!r}", where=str(path), remedy="Put it into quotes.")
    return values, profile


def _complete(root: Path, profile: str, values: Mapping[str, str]) -> Settings:
    state = root / values.get("state", ".onnx-ops")
    signing = values.get("signing", "auto")
    if signing not in _SIGNING:
        raise UserError(f"signing is {signing!r}", where=FILE, remedy=f"Write one of {', '.join(_SIGNING)}.")
    key = root / values["signing_key"] if "signing_key" in values else state / "keys" / "signing.pem"
    trusted = root / values["trusted_keys"] if "trusted_keys" in values else key.parent
    return Settings(
        root=root,
        profile=profile,
        state=state,
        targets=_place(root, values.get("targets"), ""),
        store=_place(root, values.get("store"), state / "store"),
        ledger=_place(root, values.get("ledger"), state / "ledger"),
        tracking_uri=values.get("tracking_uri") or f"sqlite:///{state / 'mlflow.db'}",
        mlflow_url=values.get("mlflow_url", ""),
        artifacts=_place(root, values.get("artifacts"), state / "mlartifacts"),
        signing=signing,
        signing_key=key,
        trusted_keys=trusted,
        notify=values.get("notify", ""),
    )


def _place(root: Path, text: str | None, default: Path | str) -> str:
    if not text:
        return str(default)
    return text if "://" in text else str(root / text)


def describe(settings: Settings) -> dict[str, str]:
    """Plain text of every setting, for `doctor`."""
    return {field.name: str(getattr(settings, field.name)) for field in fields(settings)}
