"""`kvmux ray up`: starts Ray or connects to it, deploys the application, and serves until a signal.

The flags are in server/cli/ray_flags.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
import urllib.request
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from config.errors import SettingsError
from config.settings import Settings, load_settings
from server.cli.flags import pop_settings_file
from server.cli.standard_streams import print_safely
from server.cluster.scale import Scale
from server.cluster.serve.deployment import APPLICATION_NAME, QUIET, build_application
from server.listening import listen
from server.models.files.directory import resolve_model_settings
from server.version import get_version

PROBE_TIMEOUT = 10.0  # seconds until the head of a running cluster has to accept a connection
SIGNAL_INTERVAL = 0.1  # seconds between two checks for a signal
READY_TIMEOUT = 60.0  # seconds until the API processes have to know the replicas
# Ray's processes let all others of the machine go first (15), unless its raylet finds this variable
NICENESS = "RAY_worker_niceness"
SCALE_FLAGS = {
    "replicas": "replicas",
    "max_replicas": "max_replicas",
    "replicas_per_node": "replicas_per_node",
    "cpus_per_replica": "cpus",
    "gpus_per_replica": "gpus",
}


def run(options: dict[str, Any]) -> int:
    """Deploy, and serve until a signal if the Ray cluster was started here; return the exit code."""
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS")
    scale = Scale(**{field: options.pop(flag) for flag, field in SCALE_FLAGS.items() if flag in options})
    settings = load_settings(pop_settings_file(options), options)
    if settings.metrics_port is not None:
        raise SettingsError("metrics_port: Ray's proxy has one port, on which /metrics is; leave metrics_port out")
    if address is not None:
        _connect(address)
        url = _deploy(settings, scale, "EveryNode")
        print_safely(f"{_describe(url, scale)}\n\nTo stop it, run `serve shutdown` on the head", sys.stdout)
        return 0
    with listen(settings.host, settings.port) as probe:  # a wrong address is reported before anything is started
        settings = settings.model_copy(update={"port": probe.getsockname()[1]})  # another one than 0
    settings = resolve_model_settings(settings)  # likewise a model that is not there
    return _serve_until_signal(settings, scale)


def _serve_until_signal(settings: Settings, scale: Scale) -> int:
    """Start Ray, deploy, and serve until a signal; return the exit code. A second signal raises KeyboardInterrupt."""
    signals = Signals()
    signals.handle()
    print_safely(f"kvmux {get_version()} starts Ray and {scale.replicas} replicas of {settings.model} ...", sys.stdout)
    os.environ.setdefault(NICENESS, "0")
    # "local": without an address Ray would connect to a cluster that it finds on this machine
    ray.init("local", include_dashboard=False, logging_level="warning", log_to_driver=True, namespace="kvmux")
    signals.handle()  # again, as Ray has installed handlers of its own
    try:
        if not signals.has_come:
            url = _deploy(settings, scale, "HeadOnly")
            if not signals.has_come:
                print_safely(_describe(url, scale), sys.stdout)
        while not signals.has_come:
            time.sleep(SIGNAL_INTERVAL)
        print_safely("stopping, once running requests have finished; Ctrl-C again stops at once", sys.stderr)
        _drain()
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _drain() -> None:
    """Delete the application, which ends its running requests first; `serve.shutdown` would end its proxy at once."""
    while APPLICATION_NAME in serve.status().applications:
        with contextlib.suppress(TimeoutError):  # Ray waits for a minute, and kills after `drain_seconds`
            serve.delete(APPLICATION_NAME)


def _connect(address: str) -> None:
    """Connect to a running cluster. Raises SettingsError if there is none."""
    print_safely(f"kvmux {get_version()} connects to Ray at {address} ...", sys.stdout)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # where nothing listens, Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT).close()
        ray.init(address=address, logging_level="warning", log_to_driver=False, namespace="kvmux")
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingsError(f"no Ray cluster at address {address!r}: {error}") from None


def _deploy(settings: Settings, scale: Scale, proxies: str) -> str:
    """Deploy the application and wait until it is ready; return its URL. Raises SettingsError if it cannot start."""
    http = HTTPOptions(
        host=settings.host, port=settings.port, keep_alive_timeout_s=math.ceil(settings.keep_alive_timeout)
    )
    serve.start(proxy_location=proxies, http_options=http, logging_config=QUIET)
    try:
        serve.run(build_application(settings, scale), name=APPLICATION_NAME, route_prefix="/")
    except RuntimeError as error:  # the replicas' logs, which were forwarded to stderr, have the cause
        raise SettingsError(f"the replicas did not start: {error}") from None
    url = _get_url(settings)
    deadline = time.monotonic() + READY_TIMEOUT
    while not _is_ready(url):
        if time.monotonic() > deadline:
            raise SettingsError(
                f"{url}/ready did not answer 200 within {READY_TIMEOUT:g} s; see `serve status`. "
                "If Serve was running already, its proxies have kept their host and port: give these, or stop it first"
            )
        time.sleep(0.1)
    return url


def _get_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _describe(url: str, scale: Scale) -> str:
    """Return the text to print once the application is ready."""
    with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
        model = json.load(response)["model"]
    replicas = f"{scale.replicas} replica{'s' * (scale.replicas > 1)}"
    return f"kvmux {get_version()} serves {model} on {url}, by {replicas}; {url}/v1/replicas lists them"


class Signals:
    """Handlers of SIGINT, SIGTERM and SIGHUP: the first signal is noted, the second raises KeyboardInterrupt.

    The first raises nothing, as an exception within Ray's code may get lost there, or crash the process.
    """

    def __init__(self) -> None:
        self.has_come = False

    def handle(self) -> None:
        """Install the handlers; a SIGHUP that is ignored already, as under nohup, stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        if self.has_come:
            raise KeyboardInterrupt
        self.has_come = True
