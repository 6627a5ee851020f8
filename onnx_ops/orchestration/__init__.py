"""Prefect: stages as task runs, results as artifacts, verdicts as states, releases as events."""
