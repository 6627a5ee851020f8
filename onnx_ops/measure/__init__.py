"""Measurements that pipelines share with the tools for single files."""
