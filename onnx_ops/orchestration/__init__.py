"""Integration with Prefect.

Each stage is recorded as a task run, whose state shows the verdict of a gate. Results are published
as artifacts, and releases as events.
"""
