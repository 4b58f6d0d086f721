"""Writes config/grafana/dashboards."""

from server.metrics.dashboards.catalogue import files

for file, text in files().items():
    file.write_text(text)
    print(file.name)
