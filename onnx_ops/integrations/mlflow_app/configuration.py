"""Settings of the server's operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, public_path
from onnx_ops.attestation import TrustedKeys
from onnx_ops.config.loader import LocatedPolicy, load_policy
from onnx_ops.domain.artifact import short_digest
from onnx_ops.errors import UserError
from onnx_ops.ports import Signer

TRUSTED_KEYS = "ONNX_OPS_TRUSTED_KEYS"
POLICY = "ONNX_OPS_PROMOTION_POLICY"
OVERRIDE_KEY = "ONNX_OPS_OVERRIDE_KEY"
BASIC_AUTH = "ONNX_OPS_BASIC_AUTH"

_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """`keys` are the trusted ones, None if no folder is named; `signer` signs overrides, None if none are taken."""

    keys: TrustedKeys | None = None
    policy: LocatedPolicy | None = None
    signer: Signer | None = None
    basic_auth: bool = False


def read_configuration(environ: Mapping[str, str]) -> Configuration:
    """Read the configuration from the environment; an empty variable counts as not set.

    Raises:
        UserError: a value cannot be used, or two of them do not go together.
        NotFoundError, ConfigError, RefusedError: a file is missing, wrong or readable by others.
    """
    folder, policy_file, key_file = (environ.get(name, "") for name in (TRUSTED_KEYS, POLICY, OVERRIDE_KEY))
    flag = environ.get(BASIC_AUTH, "")
    if (basic_auth := _WORDS.get(flag.lower())) is None:
        raise UserError(f"{BASIC_AUTH} is {flag!r}", remedy="Write true or false.")
    keys = TrustedKeys(Path(folder)) if folder else None
    policy = load_policy(Path(policy_file)) if policy_file else None
    if policy is not None and (names := policy.policy.names()) and not basic_auth:
        raise UserError(
            f"the policy names users ({', '.join(sorted(names))}), but this server knows none",
            where=policy_file,
            remedy=f"Set {BASIC_AUTH}=true, or let every rule say `users: ['*']`.",
        )
    signer = EcdsaSigner(Path(key_file)) if key_file else None
    if signer is not None and signer.key not in (() if keys is None else keys.keys()):
        raise UserError(
            f"overrides would be signed by key {short_digest(signer.key)}, which is not trusted",
            where=str(Path(key_file)),
            remedy=f"Put {public_path(Path(key_file)).name} into the folder that {TRUSTED_KEYS} names.",
        )
    return Configuration(keys=keys, policy=policy, signer=signer, basic_auth=basic_auth)
