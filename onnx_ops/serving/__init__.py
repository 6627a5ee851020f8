"""The endpoint server: a supervisor, worker processes, and their public and admin listeners."""
