"""Load settings from `onnx-ops.toml`, its profiles, and environment variables.

The variables are `ONNX_OPS_*`. They take precedence over the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from onnx_ops.config.binding import bind_options
from onnx_ops.config.reach import Reach
from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.quantities import Bytes, Json, Notation
from onnx_ops.errors import UserError
from onnx_ops.printable import hide_secrets_of

FILE = "onnx-ops.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifierConfig:
    """An entry of `notify`: a notifier plugin and its options, or only its name."""

    notifier: Annotated[str, Notation.SHORT_FORM]
    # A mapping has no hash, and the settings of a project must have one.
    options: Mapping[str, Json] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """The name of this entry in messages and in the ledger.

        The name contains the options, which distinguish entries of one notifier:
        `github(repository=acme/models)`.
        """
        if not self.options:
            return self.notifier
        options = (
            f"{name}={value if isinstance(value, str) else json.dumps(value, sort_keys=True)}"
            for name, value in sorted(self.options.items())
        )
        return f"{self.notifier}({', '.join(options)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """Keys of `onnx-ops.toml`. Paths are relative to its folder."""

    state: str = ".onnx-ops"
    targets: str = ""
    store: str = ""
    ledger: str = ""
    tracking_uri: str = ""
    mlflow_url: str = ""
    artifacts: str = ""
    signing: Literal["auto", "required", "off"] = "auto"
    signing_key: str = ""
    signer: str = ""
    trusted_keys: str = ""
    notify: tuple[NotifierConfig, ...] = ()
    pools: str = ""
    allowed_variables: str = ""
    allowed_paths: str = ""
    allowed_packages: str = ""
    cache_size: Bytes = 50 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Locations of state, and addresses of services.

    Default paths are below `state`. The default of `trusted_keys` is the folder of `signing_key`.

    Attributes:
        targets: Folder of target files that several projects share, or empty.
        store: Path or fsspec URL of the store; `ledger` is alike.
        tracking_uri: Tracking URI of MLflow.
        mlflow_url: Address at which people open MLflow's pages, if it differs from `tracking_uri`.
        signing: `auto` (the key file is made on first use), `required` (it must exist) or `off`
            (runs stop at the gates). With `signer`, no key file is needed.
        signer: Where the private key is if it is not in the file: `env:VARIABLE`, `awskms:KEY` or
            `azurekv:URL`.
        trusted_keys: Folder of public keys. The default folder also has the public key of
            `signing_key`, which is written there when the key is created.
        artifacts: Folder or URL for the artifacts of runs, unless `tracking_uri` is a server.
        notify: Notifiers with their options. The file can also name notifiers without options,
            separated by commas: `webhook, prefect-events`. The variable `ONNX_OPS_NOTIFY` contains
            such names, or the list as JSON.
        pools: Default work pools by kind of stage: `train=gpu, quantize=gpu`.
        allowed_variables: Environment variables that `${env:NAME}` in pipeline files may read:
            `AWS_ROLE, BUCKET_*`.
        allowed_paths: Folders and URLs outside the project that pipeline files may name: `/data,
            s3://bucket/models`.
        allowed_packages: Packages outside the project whose functions pipeline files may name, and
            whose operator libraries targets may load.
        cache_size: Maximum size of the local cache of a remote store, unless more is in use.
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
    signer: str
    trusted_keys: Path
    notify: tuple[NotifierConfig, ...]
    pools: str
    allowed_variables: str
    allowed_paths: str
    allowed_packages: str
    cache_size: Bytes

    @property
    def default_pools(self) -> Mapping[StageKind, str]:
        """Default work pools by kind of stage."""
        entries = (entry.partition("=") for entry in self.pools.split(",") if entry.strip())
        return {StageKind(kind.strip()): pool.strip() for kind, _, pool in entries}

    @property
    def reach(self) -> Reach:
        """What pipeline files may reach beyond the project."""
        return Reach(
            variables=split_list(self.allowed_variables),
            paths=split_list(self.allowed_paths),
            packages=split_list(self.allowed_packages),
        )

    @property
    def endpoints(self) -> Path:
        """Folder of the local endpoints."""
        return self.state / "endpoints"

    @property
    def models(self) -> Path:
        """Folder of the models that endpoints load."""
        return self.state / "models"

    @property
    def seen(self) -> Path:
        """Folder of the last entries that this machine has verified of each ledger."""
        return self.state / "seen"

    @property
    def environments(self) -> Path:
        """Folder of isolated environments."""
        return self.state / "environments"

    @property
    def claims(self) -> Path:
        """Folder of the locks of stages."""
        return self.state / "claims"

    @property
    def durations(self) -> Path:
        """Folder of the last durations of stages, a file for each pipeline."""
        return self.state / "durations"

    @property
    def webhook_secret(self) -> Path:
        """File that contains the secret of MLflow's webhooks."""
        return self.state / "webhook.secret"

    @property
    def console_token(self) -> Path:
        """File that contains the token of the console's viewers."""
        return self.state / "console.token"

    @property
    def shared_targets(self) -> Path | None:
        """Folder of target files that several projects share, if there is one."""
        return Path(self.targets) if self.targets else None


def split_list(text: str) -> tuple[str, ...]:
    """Return the distinct entries of a comma-separated list."""
    return tuple(dict.fromkeys(part for part in map(str.strip, text.split(",")) if part))


def find_root(start: Path) -> Path:
    """Return the root of the project around `start`.

    The root is the nearest folder from `start` upwards that contains `onnx-ops.toml`. Without such
    a folder, it is the nearest folder that contains `configs/targets`, or else `start`.
    """
    folders, markers = (start.resolve(), *start.resolve().parents), (FILE, "configs/targets")
    return next(
        (folder for marker in markers for folder in folders if (folder / marker).exists()),
        folders[0],
    )


def load_settings(start: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the project around `start`.

    `start` is the working directory by default. The variable `ONNX_OPS_ROOT` takes precedence over
    `start`.

    Raises:
        UserError: the settings file is not TOML, it lacks the requested profile, or a setting is
            invalid.
    """
    environ = os.environ if environ is None else environ
    root = (
        Path(environ["ONNX_OPS_ROOT"]).resolve()
        if "ONNX_OPS_ROOT" in environ
        else find_root(start or Path.cwd())
    )
    values, profile = _read_file(root / FILE, environ.get("ONNX_OPS_PROFILE"))
    for f in fields(FileSettings):
        if (text := environ.get(f"ONNX_OPS_{f.name.upper()}")) is not None:
            values[f.name] = text
    if isinstance(text := values.get("notify"), str):
        values["notify"] = _read_notifiers(text)
    given = bind_options(values, FileSettings, where=str(root / FILE), rules=_check_values)

    def place(text: str, default: Path) -> str:
        return text if "://" in text else str(root / text) if text else str(default)

    for url in (given.store, given.ledger, given.tracking_uri, given.mlflow_url):
        hide_secrets_of(url)
    state = root / given.state
    key = root / given.signing_key if given.signing_key else state / "keys" / "signing.pem"
    return Settings(
        root=root,
        profile=profile,
        state=state,
        targets=place(given.targets, root) if given.targets else "",
        store=place(given.store, state / "store"),
        ledger=place(given.ledger, state / "ledger"),
        tracking_uri=given.tracking_uri or f"sqlite:///{state / 'mlflow.db'}",
        mlflow_url=given.mlflow_url,
        artifacts=place(given.artifacts, state / "mlartifacts"),
        signing=given.signing,
        signing_key=key,
        signer=given.signer,
        trusted_keys=root / given.trusted_keys if given.trusted_keys else key.parent,
        notify=given.notify,
        pools=given.pools,
        allowed_variables=given.allowed_variables,
        allowed_paths=given.allowed_paths,
        allowed_packages=given.allowed_packages,
        cache_size=given.cache_size,
    )


_POOLED = (
    StageKind.TRAIN,
    StageKind.EXPORT,
    StageKind.VALIDATE,
    StageKind.CALIBRATE,
    StageKind.QUANTIZE,
)
"""Kinds of stages that can have a default pool.

Benchmarks and the scoring of rows use the pool of their target. A search uses its own pool, or that
of its first target.
"""


def _check_values(given: FileSettings) -> Iterator[tuple[str, str]]:
    for entry in filter(None, map(str.strip, given.pools.split(","))):
        kind, _, pool = (part.strip() for part in entry.partition("="))
        if kind not in _POOLED or not pool:
            yield "pools", f"'{entry}' is not KIND=POOL; kinds: {', '.join(_POOLED)}"


def _read_notifiers(text: str) -> Any:
    """Return the entries of `notify` that a text contains, before they are bound.

    The text is a list as JSON, or names of notifiers separated by commas.
    """
    if not text.lstrip().startswith("["):
        return split_list(text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(
            "the list of notifiers is not JSON",
            where="notify",
            why=str(error),
            remedy='Write, for example: [{"notifier": "webhook", "options": {}}]',
        ) from error


def to_environ(settings: Settings) -> dict[str, str]:
    """Return the environment variables that give a child process these settings."""
    environ = {
        f"ONNX_OPS_{f.name.upper()}": str(getattr(settings, f.name)) for f in fields(FileSettings)
    }
    environ["ONNX_OPS_CACHE_SIZE"] = f"{settings.cache_size} B"
    environ["ONNX_OPS_NOTIFY"] = json.dumps([asdict(entry) for entry in settings.notify])
    return {**environ, "ONNX_OPS_ROOT": str(settings.root), "ONNX_OPS_PROFILE": settings.profile}


def _read_file(path: Path, chosen: str | None) -> tuple[dict[str, Any], str]:
    """Return the values of a settings file under its profile, and the profile's name."""
    if not path.is_file():
        if chosen and chosen != "default":
            remedy = (
                f"Write {path.name} with a table [profiles.{chosen}], or unset ONNX_OPS_PROFILE."
            )
            raise UserError(
                f"profile {chosen!r} was not found: the settings file is missing",
                where=str(path),
                remedy=remedy,
            )
        return {}, "default"
    import tomllib  # Commands outside a project do not need tomllib.

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError("not TOML", where=str(path), why=str(error)) from error
    profiles: Any = document.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(
        isinstance(values, dict) for values in profiles.values()
    ):
        raise UserError(
            "profiles must be tables", where=str(path), remedy="Write each as [profiles.NAME]."
        )
    default = str(document.pop("profile", "default"))
    profile = chosen or default
    if profile not in profiles and profile != "default":
        known = ", ".join(sorted(profiles)) or "none"
        raise UserError(
            f"no profile is called {profile!r}", where=str(path), remedy=f"Profiles there: {known}."
        )
    return {**document, **profiles.get(profile, {})}, profile
