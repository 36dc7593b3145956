"""The error tree. What matters of an error is *did it happen?*, not which library raised it.

Callers branch on the class and on its fields, never on the text of a message. Each adapter translates what its
library raises in one place.
"""

from __future__ import annotations

from collections.abc import Sequence


class HybridAsyncError(Exception):
    """Everything that this package raises on purpose, our own protocol bugs excepted."""

    exit_code = 1


class ConfigError(HybridAsyncError, ValueError):
    """The user's mistake: names the setting, what was given and what would do. Exit code 2, no traceback."""

    exit_code = 2

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(f"{setting}: {message}" if setting else message)
        self.setting = setting


class OperatingError(HybridAsyncError):
    """Something that happens in operation and that a policy handles."""


class EngineError(OperatingError):
    """A call to an engine or to its sidecar went wrong."""

    def __init__(self, engine: str, operation: str, detail: str = "") -> None:
        super().__init__(f"{engine}: {operation}: {detail}" if detail else f"{engine}: {operation}")
        self.engine = engine
        self.operation = operation
        self.detail = detail


class NotSent(EngineError):
    """The request provably never left: no connection was made (R61). Nothing has to be undone."""


class Rejected(EngineError):
    """The server answered and refused. `status` is the HTTP status code."""

    def __init__(self, engine: str, operation: str, status: int, *, detail: str = "") -> None:
        super().__init__(engine, operation, f"HTTP {status} {detail}".strip())
        self.status = status


class OutcomeUnknown(EngineError):
    """The request may have left and may have been carried out (R61): whatever it did has to be undone."""


class EngineLost(EngineError):
    """The engine was taken out of service while it worked on this: nothing of its answer may be used."""


class RemoteProtocolError(EngineError):
    """The server answered something that its API doesn't allow."""


class TrainerError(OperatingError):
    """A call to the training workers went wrong."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class WorkerLost(TrainerError):
    """A worker process died or doesn't answer. `rank` is its rank in the job (1..N)."""

    def __init__(self, rank: int, detail: str, *, step: int | None = None) -> None:
        super().__init__(f"worker rank {rank} is lost: {detail}", step=step)
        self.rank = rank


class StepOutcomeUnknown(TrainerError):
    """A collective call didn't answer in time: some ranks may have applied it."""


class DivergedError(TrainerError):
    """The loss or the gradient norm isn't finite."""


class RewardError(OperatingError):
    """A reward function raised or answered the wrong number of values: not the same as a wrong answer."""


class DataError(OperatingError):
    """Prompts ran out, or what the run needs of them can't be had."""


class PromptsUsedUp(DataError):
    """The data ended before the last step, because groups were filtered or dropped."""


class CheckpointError(OperatingError):
    """A checkpoint couldn't be written, or is missing, partial or unreadable."""


class PublicationFailed(OperatingError):
    """New weights didn't reach every engine. `live` serve the version asked for, `quarantined` serve nothing."""

    def __init__(self, version: int, live: Sequence[str], quarantined: Sequence[str], *, detail: str = "") -> None:
        super().__init__(
            f"publication of weight version {version} failed: {detail or 'see the log'} "
            f"(live: {', '.join(live) or 'none'}; quarantined: {', '.join(quarantined) or 'none'})"
        )
        self.version = version
        self.live = tuple(live)
        self.quarantined = tuple(quarantined)


class CompensationFailed(HybridAsyncError):
    """An owed resume wasn't acknowledged within its budget. Never suppressed; exit code 3."""

    exit_code = 3

    def __init__(self, debts: Sequence[str]) -> None:
        super().__init__(f"Failed to resume rollout on: {', '.join(debts)}")
        self.debts = tuple(debts)


class LocalProtocolError(Exception):
    """Our own bug. Outside the tree, so that `except HybridAsyncError` can't swallow it."""


def leading_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group that says what happened; the others become notes on it."""
    leading, *others = sorted(leaves(group), key=_weight)
    for other in others:
        if isinstance(other, Exception) and str(other) != str(leading):
            leading.add_note(f"also: {type(other).__name__}: {other}")
    return leading


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside of a group, however deep, in their order; of any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def _weight(error: BaseException) -> int:
    """A failed compensation is never hidden; a cancellation explains nothing."""
    order = (CompensationFailed, LocalProtocolError, ConfigError, WorkerLost, HybridAsyncError, Exception)
    return next((rank for rank, kind in enumerate(order) if isinstance(error, kind)), len(order))
