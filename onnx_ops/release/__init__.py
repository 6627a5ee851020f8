"""Operate releases: promote, reconcile, roll back, watch, notify and prune, on the ledger as the source of truth.

The state machine: `domain.rollout` (values, next action), `domain.rollout_policy` (steps),
`domain.ledger` (entries, fold), `journal` (reading and appending entries), `effects` (intent,
effect, outcome), `reconcile` (one step at a time).
"""
