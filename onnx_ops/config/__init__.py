"""Files, settings and options to frozen values: strict, with the position of every problem."""
