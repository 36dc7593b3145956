"""Checkpoints: the workers write the model, the controller writes where the run stands, a rename makes both count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridasync.ports import CheckpointStore, Trainer


class Checkpointing:
    """A checkpoint is complete or absent: nothing half-written is ever the latest."""

    def __init__(self, store: CheckpointStore, trainer: Trainer) -> None:
        self._store = store
        self._trainer = trainer

    async def save(self, step: int, state: Mapping[str, Any]) -> str:
        """Returns the path. Raises CheckpointError; the last good checkpoint stays."""
        folder = self._store.begin(step)
        await self._trainer.save_checkpoint(str(folder / "model"))
        return str(self._store.commit(step, state))

    async def restore(self, path: Path) -> dict[str, Any]:
        """Load the model into the workers and return the state. Raises CheckpointError."""
        state = self._store.verified_state(path)
        await self._trainer.load_checkpoint(str(path / "model"))
        return state
