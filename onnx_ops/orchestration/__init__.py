"""Integration with Prefect.

A stage is a task run, and a verdict is the state of a run. Results are published as artifacts, and
releases as events.
"""
