"""Prefect: stages as task runs, results as artifacts, verdicts as states.

Prefect's server and workers import this module when they start (entry point `prefect.collections`), so it stays empty.
"""
