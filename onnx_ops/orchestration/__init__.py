"""Integration with Prefect.

Each stage is recorded as a task run. The state of a gate's task run shows its verdict. Results are
published as artifacts, and releases as events. Stages with a pool run on workers of Prefect's work
pools.
"""
