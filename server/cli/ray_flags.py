"""`kvmux ray up`: its flags and help. What it does is in server/cluster, imported by name, as it needs Ray.

Imports nothing heavy, as it comes with every start of the command line.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from config.errors import SettingsError
from config.flags import COUNT, Kind, add_flags, flag, number_flag
from config.settings import group_settings
from server.cli.flags import add_settings
from server.cli.parser import Commands, add_command, add_command_group, import_later

DESCRIPTION = """\
Serves a model by several engines, on one machine or on many, with Ray Serve; needs pip install 'kvmux[ray]'.
docs/operations/cluster.md describes it."""

UP_DESCRIPTION = """\
Starts replicas, each with an engine, and API processes that send each request to the replica that has most of
its prompt cached, unless another one has much less to do.

Without an address of a Ray cluster it starts one on this machine, and serves until Ctrl-C. With an address
(--address or RAY_ADDRESS) it deploys to that cluster, and ends. `serve status` and `serve shutdown` are Ray's own
commands for what runs there."""

UP_EPILOG = """\
On one machine, its CPU cores and, with --kv-memory auto, its memory are divided among the replicas.

examples:
  kvmux ray up --replicas 2
  kvmux ray up --replicas 4 --model models/my-model --kv-memory 2GiB --threads 4
  kvmux ray up --address auto --replicas 8 --gpus-per-replica 1 --model /shared/models/my-model
"""


_AMOUNT = Kind("X", number_flag(float, "a number, 0 or more", lambda number: 0 <= number < math.inf))


@dataclass(frozen=True)
class _ReplicaOptions:
    replicas: int = flag(1, COUNT, "number of replicas")
    max_replicas: int | None = flag(
        None,
        COUNT,
        "number up to which Ray adds replicas while prompts wait or KV memory is full (default: it adds none)",
    )
    replicas_per_node: int | None = flag(
        None, COUNT, "most replicas on a machine, among which it is divided (default: evenly many on all machines)"
    )
    cpus_per_replica: float = flag(0.0, _AMOUNT, "CPUs that Ray reserves for a replica")
    gpus_per_replica: float = flag(0.0, _AMOUNT, "GPUs that Ray gives a replica")
    address: str | None = flag(None, Kind("ADDRESS"), "address of a running Ray cluster; auto: one found here")


def add_ray(commands: Commands) -> None:
    """Add the command `ray` with its command `up`."""
    parts = add_command_group(
        commands,
        "ray",
        "up [--replicas N] [settings]",
        help="serve a model by several engines, on one machine or on many",
        description=DESCRIPTION,
    )
    _add_up(parts)


def _add_up(commands: Commands) -> None:
    parser = add_command(
        commands,
        "up",
        import_later("server.cluster.serve.command:run", check_ray),
        "[--replicas N] [--address ADDRESS] [--model MODEL] [more settings]",
        help="start replicas and API processes on Ray Serve",
        description=UP_DESCRIPTION,
        epilog=UP_EPILOG,
    )
    add_flags(parser, "replicas", _ReplicaOptions)
    add_settings(parser, group_settings())


def check_ray() -> None:
    """Raise SettingsError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError("kvmux ray needs Ray Serve, which is not installed: pip install 'kvmux[ray]'")
