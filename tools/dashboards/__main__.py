"""Writes config/grafana/dashboards."""

from tools.dashboards.catalogue import render_files

for file, text in render_files().items():
    file.write_text(text)
    print(file.name)
