"""Bind files, settings and options to frozen values: strictly, with the position of every problem."""
