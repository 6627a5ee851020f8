"""Judge a rollout from counts of requests, at any time."""
