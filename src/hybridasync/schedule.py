"""What is due after which step: R1-R10 and R48, and nothing else decides it.

`step` is 0-based; `completed = step + 1`. Publication and evaluation both go through `periodic`, so that an evaluation
never finds weights that weren't published (R9).
"""

from __future__ import annotations

from dataclasses import dataclass


def check_interval(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a positive int (booleans are refused: R2)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")


def periodic(step: int, interval: int | None, *, steps_per_epoch: int | None, num_rollout: int | None) -> bool:
    """Whether something periodic is due after `step` (R10).

    `steps_per_epoch` None means that the length of an epoch is unknown: then there is no epoch rule at all (R8).
    `num_rollout` None means that the last step is nothing special.
    """
    if interval is None:
        return False
    if num_rollout is not None and step == num_rollout - 1:
        return True
    completed = step + 1
    return completed % interval == 0 or (steps_per_epoch is not None and completed % steps_per_epoch == 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The resolved numbers of a run; `eval_interval` is None unless evaluation is configured (R5)."""

    num_rollout: int
    update_weights_interval: int = 1
    eval_interval: int | None = None
    steps_per_epoch: int | None = None
    save_interval: int | None = None
    eval_at_end: bool = False

    def __post_init__(self) -> None:
        check_interval("num_rollout", self.num_rollout)
        check_interval("update_weights_interval", self.update_weights_interval)
        for name in ("eval_interval", "steps_per_epoch", "save_interval"):
            if (value := getattr(self, name)) is not None:
                check_interval(name, value)

    def publish_due(self, step: int, *, interval: int | None = None, published: int = 0) -> bool:
        """Publication: every K completed steps, always after the last one, and whenever an evaluation is due.

        With an adaptive `interval` the K steps count from the last publication, after `published` completed ones.
        """
        if interval is None:
            due = periodic(step, self.update_weights_interval, steps_per_epoch=None, num_rollout=self.num_rollout)
        else:
            due = step + 1 - published >= interval or step == self.num_rollout - 1
        return due or self._eval_period(step)

    def eval_due(self, step: int) -> bool:
        """Evaluation: by interval and at epoch ends; after the last step only with `eval_at_end` (U6)."""
        at_end = self.eval_at_end and self.eval_interval is not None and step == self.num_rollout - 1
        return self._eval_period(step) or at_end

    def save_due(self, step: int) -> bool:
        """Checkpoint: after the last step in any case, and after every `save_interval`-th."""
        return step == self.num_rollout - 1 or periodic(
            step, self.save_interval, steps_per_epoch=None, num_rollout=None
        )

    def _eval_period(self, step: int) -> bool:
        return periodic(step, self.eval_interval, steps_per_epoch=self.steps_per_epoch, num_rollout=None)
