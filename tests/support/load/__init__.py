"""A load generator for endpoint servers.

Run `python -m tests.support.load URL`, or use `LoadProcess` from Python.
"""

from tests.support.load.plan import LoadPlan, Payload
from tests.support.load.process import LoadProcess
from tests.support.load.records import Failure, Publication, Records, stale

__all__ = ["Failure", "LoadPlan", "LoadProcess", "Payload", "Publication", "Records", "stale"]
