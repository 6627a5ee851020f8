"""Operate releases, with the ledger as the source of truth.

Examples of operations are promotion, reconciliation, rollback, notification and pruning.

The state machine consists of these modules:

- `domain.rollout` defines its values, and computes the next action.
- `domain.rollout_policy` defines the steps of a rollout.
- `domain.ledger` defines the entries, and folds them into a state.
- `journal` reads and appends entries.
- `effects` records the intent, performs the action, and records the outcome.
- `reconcile` takes one step at a time.
"""
