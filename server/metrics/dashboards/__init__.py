"""Grafana's dashboards, written from the table of metrics: config/grafana/dashboards has them as JSON.

`python -m server.metrics.dashboards` writes them again; a test compares. Needs the extra `dashboards`.
"""
