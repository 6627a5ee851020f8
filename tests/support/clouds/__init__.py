"""Fake clouds on loopback, used by the real SDKs, with real inference behind them."""
