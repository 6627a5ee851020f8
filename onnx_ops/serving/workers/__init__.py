"""Processes of the server: supervisor, workers, shadow processes, and trial loads."""
