"""Clouds on this machine, for the tests of providers: control planes that answer the real SDKs over sockets."""
