"""Phases of a publication as they can be seen from outside, in a run whose sidecar is its own: within milliseconds.

There the controller has the sidecar's address from the sidecar itself, so that no relay can stand between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from hybridasync.transport.weights import _places

IN_THE_TRANSFER_S = 0.003
LAST_LINE_BYTES = 400


class OwnPhases:
    """Looks at journal, snapshots and the sidecar's status. `reached` is asked again and again for one phase."""

    def __init__(self, run_dir: Path, phase: str, token: str) -> None:
        self._run_dir = run_dir
        self._phase = phase
        self._client = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=2.0, trust_env=False)
        self._newest = self._snapshots()
        self._version = self._status().get("weight_version")
        self._was_paused = False

    def close(self) -> None:
        self._client.close()

    def reached(self) -> bool:
        looks: dict[str, Callable[[], bool]] = {
            "before pause": lambda: self._snapshots() > self._newest,
            "pause sent": lambda: b"pause_incurred" in self._last_record(),
            "paused": self._paused,
            "mid-transfer": self._in_the_transfer,
            "flipped": self._flipped,
            "end sent": self._ended,
        }
        return looks[self._phase]()

    def _paused(self) -> bool:
        return self._status().get("state") == "paused"

    def _in_the_transfer(self) -> bool:
        if not self._paused():
            return False
        time.sleep(IN_THE_TRANSFER_S)
        return True

    def _flipped(self) -> bool:
        status = self._status()
        if status.get("state") == "running":
            self._version = status["weight_version"]
        return status.get("state") == "paused" and status["weight_version"] != self._version

    def _ended(self) -> bool:
        before, self._was_paused = self._was_paused, self._paused()
        return before and not self._was_paused

    def _snapshots(self) -> str:
        found = [path.name for folder in _places(self._run_dir.resolve(), None) for path in folder.glob("version-*")]
        return max(found, default="")

    def _last_record(self) -> bytes:
        with suppress(OSError), (self._run_dir / "journal.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LAST_LINE_BYTES))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2]
        return b""

    def _status(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, httpx.HTTPError):
            url = json.loads((self._run_dir / "logs" / "sidecar-0.json").read_text())["url"]
            return dict(self._client.get(f"{url}/v1/status").json())
        return {}
