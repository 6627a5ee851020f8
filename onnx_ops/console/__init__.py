"""The console: read-only pages about endpoints, rollouts, history and releases.

`server` answers requests within the limits of `access`. `shared_reads` shares the results of reads
between viewers. `snapshot` reads the endpoints, and `pages` renders what was read.
"""
