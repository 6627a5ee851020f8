"""The endpoint server: a supervisor, its worker processes, and their listeners."""
