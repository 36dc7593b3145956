"""The section `publication` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybridasync.config.section import Interval, Positive, Seconds, Section


class PublicationSection(Section):
    """How new weights reach the engines, and what is owed when that fails."""

    transport: Literal["disk", "collective", "tensor"] = Field(
        default="disk",
        description=(
            "disk: engines read the snapshot from its folder; collective: it is broadcast to them over gloo, or NCCL "
            "on CUDA; tensor: it is sent in HTTP requests. The last two need no folder that engines can read"
        ),
    )
    bucket_mib: Annotated[float, Field(gt=0, le=65536)] = Field(
        default=256.0, description="transport collective and tensor: size of what is sent at once, in MiB"
    )
    update_weights_interval: Interval = Field(
        default=1,
        description=(
            "publish after every K-th step, the last one and those that evaluate; 1 = after each. "
            "Samples may then be K - 1 weight versions older. auto: K from what publications are measured to cost, "
            "between k_min and k_max"
        ),
    )
    k_min: Positive = Field(default=1, description="update_weights_interval auto: the smallest K")
    k_max: Positive = Field(
        default=4, description="update_weights_interval auto: the largest K; never above max_staleness + 1"
    )
    staged: bool = Field(
        default=True,
        description=(
            "engines prepare the new weights beside the old ones while they generate, and switch between two tokens; "
            "engines that can't (SGLang) load under a pause"
        ),
    )
    delta: bool = Field(
        default=False,
        description=(
            "send only what changed since the version that the engine holds, bit-exact; the trainer keeps a copy of "
            "what it published last. For embedded engines; others get everything"
        ),
    )
    blocking: bool = Field(
        default=False,
        description=(
            "for comparison: export, transfer and verify under the pause, as systems do that don't stage; excludes "
            "staged and delta"
        ),
    )
    clear_cache_on_skipped_steps: bool = Field(
        default=False,
        description=(
            "empty the trainer's CUDA allocator cache after each step that doesn't publish, and in each publication: "
            "a lower peak of reserved memory for some time"
        ),
    )
    pause_mode: Literal["drain", "retract", "abort"] | None = Field(
        default=None,
        description=(
            "what new weights do to requests in flight; default: drain in sync and hybrid, retract in fully_async"
        ),
    )
    rollout_http_timeout: Seconds = Field(default=120.0, description="deadline of one control call")
    lease_s: Seconds = Field(
        default=60.0, description="a sidecar ends a pause by itself when its lease isn't renewed for so long"
    )
    drain_timeout_s: Seconds = Field(
        default=600.0, description="how long to wait for requests in flight, and for engines to be ready to pause"
    )
    resume_budget_s: Annotated[float, Field(gt=0, lt=30)] = Field(
        default=20.0,
        description=(
            "budget of all that is owed after a swap together: half for the resumes, the rest for fencing where they "
            "aren't confirmed; under torchrun's 30 s"
        ),
    )
    on_ambiguous_pause: Literal["fence", "fail", "degrade"] = Field(
        default="fence", description="what to do with an engine whose resume isn't confirmed"
    )
    weights_dir: str | None = Field(
        default=None, description="folder for weight snapshots; default shared memory where engines are local"
    )

    @property
    def longest_interval(self) -> int:
        """Steps: the most that may lie between two publications."""
        return self.k_max if self.update_weights_interval == "auto" else self.update_weights_interval
