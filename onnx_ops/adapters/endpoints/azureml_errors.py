"""What Azure's errors mean, and what to do about them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from onnx_ops.adapters.azure import LOGIN_REMEDY, ROLE_REMEDY, first_line
from onnx_ops.errors import ConflictError, InfrastructureError, OnnxOpsError, RefusedError, ServiceUnavailableError

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_QUOTA = re.compile(r"quota|OutOfCapacity|not enough (cores|capacity)", re.IGNORECASE)
_UNHEARD = re.compile(r"timed out|connection (aborted|refused|reset)|failed to establish", re.IGNORECASE)
_BUSY = re.compile(r"provisioning state|another operation|is in progress", re.IGNORECASE)

SPARE = 1.2
"""Azure keeps a fifth of a deployment's instances in reserve for its upgrades, and counts them."""


class Busy(ConflictError):
    """Azure changes the same thing just now."""


class Gone(InfrastructureError):
    """What was asked about is not there."""


def explained(error: BaseException, *, where: str, instances: int = 1) -> OnnxOpsError:
    """An error of the SDK as one of ours.

    Args:
        where: what was asked about.
        instances: how many were asked for, should there be no quota for them.
    """
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError, ServiceRequestError

    status = getattr(error, "status_code", None)
    text = first_line(error)
    if isinstance(error, ClientAuthenticationError) and status is None and _UNHEARD.search(str(error)):
        return ServiceUnavailableError(
            "nobody answers who gives out tokens", where=where, why=text, remedy="Try again."
        )
    if isinstance(error, ClientAuthenticationError) or status == 401:
        return RefusedError("Azure does not know who we are", where=where, why=text, remedy=LOGIN_REMEDY)
    if status == 403:
        return RefusedError("Azure does not let us do that", where=where, why=text, remedy=ROLE_REMEDY)
    if _QUOTA.search(f"{getattr(getattr(error, 'error', None), 'code', '')} {text}"):
        return _no_quota(text, where, instances)
    if status == 409 or (status == 400 and _BUSY.search(text)):
        return Busy("Azure is busy with it", where=where, why=text, remedy="Try again when that is done.")
    if status == 404:
        return Gone("it is not there", where=where, why=text)
    if status in _TRANSIENT or not isinstance(error, HttpResponseError) or isinstance(error, ServiceRequestError):
        return ServiceUnavailableError("Azure does not answer", where=where, why=text, remedy="Try again.")
    remedy = f"See its log: az ml online-deployment get-logs (or the portal), under {where}."
    return InfrastructureError("Azure could not do it", where=where, why=text, remedy=remedy)


@contextmanager
def explaining(where: str, *, instances: int = 1) -> Iterator[None]:
    """Raise what the SDK raises inside as one of our errors."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, MlException, OSError) as error:
        raise explained(error, where=where, instances=instances) from error


def _no_quota(text: str, where: str, instances: int) -> InfrastructureError:
    needed = math.ceil(instances * SPARE)
    return InfrastructureError(
        "there is not enough quota",
        where=where,
        why=text,
        remedy=f"{instances} of its instances need quota for {needed}, as Azure keeps 20% in reserve. Ask for more in "
        "the portal (Quotas, Machine learning), delete a deployment that nobody needs, or take a smaller size.",
    )
