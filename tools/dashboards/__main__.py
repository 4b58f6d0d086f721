"""`python -m tools.dashboards`: writes the Grafana dashboards in config/grafana/dashboards."""

import argparse

from tools.dashboards.catalogue import render_files

argparse.ArgumentParser(prog="python -m tools.dashboards", description=__doc__).parse_args()
for file, text in render_files().items():
    file.write_text(text)
    print(file.name)
