"""Generates the Grafana dashboards in config/grafana/dashboards from the table of metrics.

`python -m tools.dashboards` writes the JSON files, and a test checks them. Needs the extra `dashboards`.
"""
