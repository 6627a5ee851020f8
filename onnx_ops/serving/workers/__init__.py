"""Processes of the server: the supervisor, its workers, and trial loads."""
