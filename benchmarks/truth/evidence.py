"""Evidence that contains only what is judged.

The verdicts come from the product's own judge.
"""

from __future__ import annotations

from functools import partial

from tests.support.evidence import make_evidence

evidence = partial(make_evidence, variant="candidate", quantized=False)
"""Make evidence of a float variant against `fp32`, with the given fields."""
