"""Clouds on loopback that the real SDKs talk to, with real inference behind them."""
