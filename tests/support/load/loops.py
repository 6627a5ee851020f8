"""Clients in threads of a test, which call an endpoint through any SDK.

`LoadProcess` measures a server. These clients only count, and work where an SDK sends the requests.
"""

from __future__ import annotations

import itertools
import threading
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

BATCH = 20
"""Requests of users between two reports of feedback."""
USERS = 2000
PAUSE_S = 0.01


class RequestLoop:
    """A client that calls `send` again and again, and records failures.

    It does nothing while `send` is None.
    """

    def __init__(self, send: Callable[[], object] | None = None) -> None:
        self.send = send
        self.answered = 0
        self.failed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(PAUSE_S):
            if (send := self.send) is not None:
                try:
                    send()
                    self.answered += 1
                except urllib.error.URLError as error:
                    self.failed.append(str(error))


@dataclass
class Users:
    """Answers to users: deployments by user, and the reasons of the failed requests."""

    seen: dict[str, set[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    answered: int = 0


@contextmanager
def users_that_report(
    invoke: Callable[[int, str], tuple[str, str]],
    report: Callable[[Mapping[str, bool]], object],
    shares: Mapping[str, float],
    *,
    users: int = USERS,
) -> Iterator[Users]:
    """Run a client for many users, which reports feedback on each answer.

    Args:
        invoke: sends the request with a number for a user, and returns the deployment that answered
            and its feedback token. It raises an OSError if the request fails.
        report: reports whether answers were good, by token.
        shares: shares of good answers, by deployment; without a share, no feedback is reported.
        users: number of users that take turns.
    """
    results, stop = Users(), threading.Event()
    good = {
        name: itertools.cycle([number < 10 * share for number in range(10)])
        for name, share in shares.items()
    }

    def send(number: int) -> tuple[str, str] | None:
        user = f"user-{number % users}"
        try:
            deployment, token = invoke(number, user)
        except OSError as error:
            # URLError is also an OSError.
            results.failed.append(str(error))
            return None
        results.answered += 1
        results.seen.setdefault(user, set()).add(deployment)
        return deployment, token

    def work() -> None:
        for start in itertools.count(step=BATCH):
            if stop.is_set():
                return
            answers = [send(number) for number in range(start, start + BATCH)]
            successes = {
                token: next(good[deployment])
                for deployment, token in filter(None, answers)
                if token and deployment in good
            }
            if successes:
                report(successes)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join()
