"""Says whether a server needs the controller of roll-outs from its start on, and where that keeps its state.

Imports nothing heavy: the supervisor asks it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from config.settings import Settings
from server.models.errors import ModelError
from server.models.files.user_cache import expand_user, user_state_dir

log = logging.getLogger(__name__)


def needs_controller(settings: Settings) -> bool:
    """Return whether there are roll-outs or comparisons from the start; operators may start roll-outs later."""
    if settings.rollouts or any(rule.shadow for rule in settings.rules):
        return True
    file = choose_rollouts_file(settings)
    return file is not None and file.exists()


def choose_rollouts_file(settings: Settings) -> Path | None:
    """Return the file for the state of roll-outs; None if it is not kept (rollouts_file "off").

    By default, servers of one user with another model, host or port have a file each.
    """
    if settings.rollouts_file in ("", "off"):
        return None
    try:
        if settings.rollouts_file is not None:
            return expand_user(settings.rollouts_file)
        model = os.path.abspath(settings.model) if os.path.exists(settings.model) else settings.model
        identity = "\0".join(map(str, (model, settings.revision, settings.host, settings.port)))
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16]
        return user_state_dir() / "rollouts" / f"{digest}.json"
    except ModelError as error:
        log.warning("the state of roll-outs is not kept for the next start: %s; or set rollouts_file", error)
        return None
