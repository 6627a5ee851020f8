"""Random numbers of the truth tables.

Every run draws new worlds from one seed, which it prints.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

import numpy as np

_SEED_BITS = 32

_RUN_SEED: ContextVar[int] = ContextVar("run_seed", default=0)


def begin_run(seed: int | None) -> int:
    """Set the seed of this run, a new one if none is given, and return it."""
    chosen = secrets.randbits(_SEED_BITS) if seed is None else seed
    _RUN_SEED.set(chosen)
    print(f"seed {chosen} (--seed {chosen} repeats these worlds)", flush=True)
    return chosen


def derive_seed(*world: int) -> int:
    """Return the seed of one world of this run.

    The seeds of different worlds are independent. So are the seeds of one world in different runs.
    """
    return int(np.random.SeedSequence([_RUN_SEED.get(), *world]).generate_state(1)[0])


def make_generator(*world: int) -> np.random.Generator:
    """Return the generator of one world of this run."""
    return np.random.default_rng([_RUN_SEED.get(), *world])
