"""Checks of the promises of the gates, with one module for each gate."""
