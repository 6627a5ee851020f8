"""Integration of Prefect.

Stages are task runs, results artifacts, verdicts states, and releases events.
"""
