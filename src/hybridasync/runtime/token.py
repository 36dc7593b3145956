"""The secret between a controller and its sidecars, and where a run leaves it for `resume-rollout`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

TOKEN_VARIABLE = "HYBRIDASYNC_TOKEN"
FILE_NAME = ".token"


def token_of(run_dir: Path) -> str:
    """The environment's token, or a new one, left in the run directory for its owner's eyes only."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given:
        return given
    token = secrets.token_hex(16)
    path = run_dir / FILE_NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return token


def read_token(run_dir: Path) -> str:
    """What `token_of` left; empty if there is none."""
    try:
        return (run_dir / FILE_NAME).read_text().strip()
    except OSError:
        return ""
