"""What moto's IAM lacks: whether a role's policies permit something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from tests.support.clouds.iam import ROLE, Request, container, is_allowed


def policy_question(environ: dict[str, Any]) -> list[Request] | None:
    """What SimulatePrincipalPolicy is asked about a role, which its contexts name; None for another request."""
    if environ.get("PATH_INFO") != "/" or environ.get("HTTP_X_AMZ_TARGET"):
        return None
    asked = parse_qs(environ["wsgi.input"].getvalue().decode("utf-8", "replace"))
    if asked.get("Action") != ["SimulatePrincipalPolicy"]:
        return None
    resources = [values[0] for name, values in asked.items() if name.startswith("ResourceArns.")]
    actions = [values[0] for name, values in sorted(asked.items()) if name.startswith("ActionNames.")]
    about = {"role": asked["PolicySourceArn"][0]}
    return [Request(action, resource, about) for resource in resources for action in actions]


def policy_answer(asked: Sequence[Request], denied: Sequence[str]) -> bytes:
    """What the role of `infra/aws` may do, and other roles everything, but for the actions that are `denied`."""

    def decision(request: Request) -> str:
        able = request.context["role"] != ROLE or is_allowed(container(), request)
        return "allowed" if request.action not in denied and able else "implicitDeny"

    rows = "".join(
        f"<member><EvalActionName>{request.action}</EvalActionName>"
        f"<EvalDecision>{decision(request)}</EvalDecision></member>"
        for request in asked
    )
    return (
        '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
        f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{rows}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>"
        "</SimulatePrincipalPolicyResponse>"
    ).encode()
