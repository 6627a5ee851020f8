"""What every test has: the division of the suite over workers and commits."""

pytest_plugins = ("tests.support.suite", "tests.support.golden")
