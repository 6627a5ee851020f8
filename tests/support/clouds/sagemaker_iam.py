"""What moto's IAM lacks: whether a role's policies permit something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs


def policy_question(environ: dict[str, Any]) -> list[str] | None:
    """The actions that SimulatePrincipalPolicy is asked about; None if it is another request."""
    if environ.get("PATH_INFO") != "/" or environ.get("HTTP_X_AMZ_TARGET"):
        return None
    asked = parse_qs(environ["wsgi.input"].getvalue().decode("utf-8", "replace"))
    if asked.get("Action") != ["SimulatePrincipalPolicy"]:
        return None
    return [values[0] for name, values in sorted(asked.items()) if name.startswith("ActionNames.")]


def policy_answer(actions: Sequence[str], denied: Sequence[str]) -> bytes:
    rows = "".join(
        f"<member><EvalActionName>{action}</EvalActionName>"
        f"<EvalDecision>{'implicitDeny' if action in denied else 'allowed'}</EvalDecision></member>"
        for action in actions
    )
    return (
        '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
        f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{rows}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>"
        "</SimulatePrincipalPolicyResponse>"
    ).encode()
