"""Judge a rollout from counts of requests; verdicts are valid at any time."""
