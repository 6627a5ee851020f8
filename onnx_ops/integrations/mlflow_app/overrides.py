"""Overrides as a person gives them in the registry: a tag with the reason, which the server signs together with who."""

from __future__ import annotations

import re

from onnx_ops import codec
from onnx_ops.attestation import sign_record
from onnx_ops.domain.attestation import MAX_REASON_LENGTH, OVERRIDE_TAG_PREFIX, override_reason_tag, override_record_tag
from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.domain.release import VersionRecord, is_among
from onnx_ops.errors import RefusedError
from onnx_ops.integrations.mlflow_app.configuration import OVERRIDE_KEY, POLICY, Configuration
from onnx_ops.integrations.mlflow_app.store import StoredVersion, Versions
from onnx_ops.ports import Clock
from onnx_ops.release.decision_policy import build_override

_REASON = re.compile(rf"{re.escape(OVERRIDE_TAG_PREFIX)}({NAME_PATTERN})")


class Overrides:
    """Who may override, and the record of it."""

    def __init__(self, configuration: Configuration, versions: Versions, clock: Clock) -> None:
        self._configuration = configuration
        self._versions = versions
        self._clock = clock

    def give(self, user: str, found: StoredVersion, record: VersionRecord, key: str, reason: str) -> None:
        """Sign that the user overrides, before the tag with the reason is set; the record alone allows nothing.

        Raises:
            RefusedError: with the reason.
        """
        self._permit(user, key)
        target = _target(key)
        signer, keys = self._configuration.signer, self._configuration.keys
        if signer is None:
            raise RefusedError("this server signs no overrides", remedy=f"Its operator names a key in {OVERRIDE_KEY}.")
        if not reason.strip():
            raise RefusedError("an override needs a reason", remedy="Write it as the tag's value.")
        if len(reason) > MAX_REASON_LENGTH:
            raise RefusedError(f"the reason has {len(reason)} characters, of at most {MAX_REASON_LENGTH}")
        about = build_override(record, target, keys, reason=reason, by=user, now=self._clock.now())
        envelope = sign_record(about, signer).envelope
        self._versions.annotate(found, override_record_tag(target), codec.dumps(envelope).decode())

    def take_back(self, user: str, key: str) -> None:
        """The tag with the reason is about to be deleted; the signed record stays, as a trace.

        Raises:
            RefusedError: with the reason.
        """
        self._permit(user, key)
        _target(key)

    def advice(self, user: str, target: str) -> str:
        """How this user gets the version to serve all the same."""
        located = self._configuration.policy
        if self._configuration.signer is None or located is None or not located.policy.overrides:
            return "Or promote a version that passed."
        if is_among(user, located.policy.overrides):
            return f"Or override it: set tag {override_reason_tag(target)} with the reason, then this alias again."
        return f"Or ask {' or '.join(located.policy.overrides)} to override it, with a reason."

    def _permit(self, user: str, key: str) -> None:
        located = self._configuration.policy
        if located is None:
            raise RefusedError(
                "no promotion policy says who may override", remedy=f"Its operator names one in {POLICY}."
            )
        users = located.policy.overrides
        if not is_among(user, users):
            lets = f"lets only {', '.join(users)} override" if users else "lets nobody override"
            raise RefusedError(f"{located.overrides_at} {lets}, and you are {user or 'not known'}")


def _target(key: str) -> str:
    match = _REASON.fullmatch(key)
    if match is None:
        raise RefusedError(
            "only the server itself writes it", remedy=f"The reason of an override is {override_reason_tag('TARGET')}."
        )
    return match[1]
