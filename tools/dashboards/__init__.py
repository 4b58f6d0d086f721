"""Grafana's dashboards, written from the table of metrics: config/grafana/dashboards has them as JSON.

`python -m tools.dashboards` writes them again; a test compares. Needs the extra `dashboards`.
"""
