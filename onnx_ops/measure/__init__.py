"""Measurements that pipelines and the tools for single files share."""
