"""Writes config/grafana/dashboards."""

from tools.dashboards.catalogue import files

for file, text in files().items():
    file.write_text(text)
    print(file.name)
