"""Operate releases, with the ledger as the source of truth.

The operations are promotion, reconciliation, rollback, watching, notification and pruning.

The state machine: `domain.rollout` (values, next action), `domain.rollout_policy` (steps),
`domain.ledger` (entries, fold), `journal` (reading and appending entries), `effects` (intent,
effect, outcome), `reconcile` (one step at a time).
"""
