"""locust: the project's own load test, for a few seconds; it fails by its exit code."""

import subprocess
import sys
from pathlib import Path

URL, MODEL = sys.argv[1:]
asked = ("--users", "4", "--spawn-rate", "4", "--run-time", "5s", "--stop-timeout", "60", "--models", MODEL)
command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
subprocess.run([*command, "--host", URL, *asked], cwd=Path(__file__).parents[3], check=True)
