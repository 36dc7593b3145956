"""RL post-training of language models: Megatron-core trains, SGLang generates, one event loop controls.

import hybridasync

async def main() -> None:
    async with hybridasync.Run("quickstart-fast", run_dir="runs/mine") as run:
        async for step in run:
            print(step.step, step.metrics["reward_mean"])

hybridasync.launch(main, "quickstart-fast")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridasync.errors import HybridAsyncError

if TYPE_CHECKING:
    from hybridasync.app import Run
    from hybridasync.config.load import load
    from hybridasync.main import launch

__all__ = ["HybridAsyncError", "Run", "launch", "load"]

_HOMES = {"Run": "hybridasync.app", "launch": "hybridasync.main", "load": "hybridasync.config.load"}


def __getattr__(name: str) -> Any:
    """Imported on first use: `import hybridasync` must not cost the import of torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
