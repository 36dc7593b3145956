"""The settings, one model for each section of a recipe. Defaults, units and meaning live here and nowhere else.

`docs/configuration.md` is generated from these models. Relations between settings are checked in `pipeline.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hybridasync.config.publication import PublicationSection
from hybridasync.config.section import Fraction, NonNegative, Positive, Seconds, Section


class RunSection(Section):
    """Where the run lives and how it ends."""

    dir: str | None = Field(default=None, description="run directory; default runs/<recipe>-<time>")
    debug_train_only: bool = Field(default=False, description="no engines: warm start or supervised training alone")
    max_restarts: NonNegative = Field(default=0, description="restarts from the last checkpoint after a failure")
    max_reward_error_fraction: Fraction = Field(
        default=0.5, description="share of the last 64 samples whose reward function may fail before the run stops"
    )


class PrepareSection(Section):
    """A function that makes what the recipe needs (model, data files) under <run dir>/prepared, before the rest starts.

    Paths elsewhere in the recipe name that folder as {prepared}.
    """

    function: str | None = Field(
        default=None, description="module:function called as function(directory, seed, **args)"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class ModelSection(Section):
    """The policy and, where the loss needs one, the reference model."""

    hf_checkpoint: str = Field(
        description="Hugging Face directory of the policy: config, tokenizer, and the weights unless load names others"
    )
    load: str | None = Field(
        default=None,
        description=(
            "where the first weights come from: a Megatron checkpoint (the checkpoints folder of another run), "
            "which is gone on with at its step, or a Hugging Face directory; default ref_load, else hf_checkpoint"
        ),
    )
    ref_load: str | None = Field(
        default=None,
        description=(
            "Hugging Face directory or Megatron checkpoint of the reference model; needed by a KL term, else not loaded"
        ),
    )
    ref_ckpt_step: NonNegative | None = Field(
        default=None, description="step of the Megatron checkpoint at ref_load; default its newest"
    )
    megatron_to_hf_mode: Literal["raw", "bridge"] = Field(
        default="raw",
        description=(
            "raw: load or ref_load has to be a Megatron checkpoint; bridge: a Hugging Face directory will do, and is "
            "the default where load isn't set"
        ),
    )
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="parameter type in training")


class ParallelSection(Section):
    """How the model is laid out over the workers. Data parallelism is what remains: workers / (tp × pp)."""

    num_workers: Positive = Field(default=1, description="training ranks of the whole job, the controller not counted")
    tensor_model_parallel_size: Positive = Field(default=1, description="tensor parallel size (TP)")
    pipeline_model_parallel_size: Positive = Field(default=1, description="pipeline parallel size (PP)")
    use_distributed_optimizer: bool = Field(
        default=False, description="shard the optimizer state over data-parallel ranks"
    )
    recompute_activations: bool = Field(
        default=False, description="recompute activations in the backward pass, to save memory"
    )
    max_tokens_per_micro_batch: Positive = Field(
        default=8192, description="tokens packed into one forward pass of a rank; a longer sample goes alone"
    )


class DataSection(Section):
    """Prompts to train on."""

    prompt_data: str | None = Field(
        default=None, description="JSONL file of prompts (or Parquet, with the parquet extra)"
    )
    extra_prompt_data: tuple[str, ...] = Field(
        default=(), description="further data files, mixed with prompt_data; each wraps by itself"
    )
    weights: tuple[float, ...] = Field(
        default=(), description="weight of each file in the draws, prompt_data's first; default: their sizes"
    )
    prompt_function: str | None = Field(
        default=None,
        description=(
            "module:function called as function(index, seed) that makes prompt number index, a row like those of a "
            "file, or None after the last; instead of files where rollout_global_dataset is false"
        ),
    )
    prompt_key: str = Field(default="prompt", description="field with the prompt: a string, or a list of chat messages")
    label_key: str = Field(default="label", description="field with the gold answer")
    apply_chat_template: bool = Field(
        default=False, description="render the prompt through the tokenizer's chat template"
    )
    prompt_template: str | None = Field(default=None, description="text around the prompt, with {prompt} in it")
    shuffle: bool = Field(default=True, description="shuffle each epoch with the seed")
    max_prompt_tokens: Positive | None = Field(
        default=None, description="longer prompts are filtered, with a count; default context_length - 1"
    )


class RolloutSection(Section):
    """How completions are drawn, and how far the engines may run ahead."""

    num_rollout: Positive | None = Field(default=None, description="training steps of the run")
    num_epoch: Positive | None = Field(
        default=None, description="passes over the data; with num_rollout the smaller one counts"
    )
    start_rollout_id: NonNegative | None = Field(
        default=None, description="first step (0-based) of a run that begins without a checkpoint; default 0"
    )
    rollout_global_dataset: bool = Field(
        default=True, description="prompts are a data set of known size; false: data.prompt_function makes them"
    )
    strict_epochs: bool = Field(
        default=False, description="refuse num_epoch when the batch doesn't divide the data set"
    )
    rollout_batch_size: Positive = Field(description="prompts (groups) of one step")
    n_samples_per_prompt: Positive = Field(description="samples of a group")
    max_response_tokens: Positive = Field(description="cap on the tokens of a completion")
    temperature: float = Field(
        default=1.0, gt=0, description="sampling temperature; log-probs on both sides are at this temperature"
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="must be 1: a truncated distribution has other log-probs than the trainer's",
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "each sample is drawn with a seed of its own, made of seed, prompt and its number: batching and order then "
            "change nothing. SGLang is started with --enable-deterministic-inference, which wants a GPU"
        ),
    )
    max_staleness: NonNegative = Field(
        default=0, description="steps that the engines may run ahead of training (partition lag)"
    )
    partial_rollout: bool = Field(
        default=True,
        description="continue a sample that a publication interrupted; off: start it again from its prompt",
    )
    request_timeout_s: Seconds = Field(default=600.0, description="deadline of one generate request")
    max_retries: NonNegative = Field(default=2, description="further attempts at a group whose request failed")


class RewardSection(Section):
    """What a completion is worth."""

    function: str = Field(default="exact_match", description="exact_match, gsm8k, math_verify, or module:function")
    batched: bool = Field(
        default=False, description="module:function takes lists (one call for a group) instead of one sample"
    )
    timeout_s: Seconds = Field(default=60.0, description="deadline of one call")
    overlong_buffer_tokens: NonNegative = Field(
        default=0, description="DAPO soft overlong penalty: width of the buffer before the cap; 0 = off"
    )
    overlong_penalty_factor: float = Field(default=1.0, ge=0, description="largest overlong penalty")
    mask_truncated: bool = Field(default=False, description="samples cut by the cap carry no loss (overlong filtering)")


class AlgorithmSection(Section):
    """Advantages, loss and filters."""

    advantage: Literal["grpo", "dr_grpo"] = Field(
        default="grpo", description="grpo: (r - mean) / std of the group; dr_grpo: r - mean"
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        default="token_mean",
        description=(
            "token_mean: over all tokens of the global batch (DAPO); sequence_mean: "
            "mean of each sample's mean (GRPO); constant: sum / (samples × "
            "max_response_tokens) (Dr.GRPO)"
        ),
    )
    eps_clip: float = Field(default=0.2, gt=0, lt=1, description="lower clip range of the importance ratio")
    eps_clip_high: float | None = Field(
        default=None, gt=0, description="upper clip range (clip-higher: 0.28); default eps_clip"
    )
    eps_clip_c: float | None = Field(
        default=None,
        gt=1,
        description="dual clip: bound of the loss where the advantage is negative, as a multiple of it; default off",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token",
        description=(
            "token: a ratio for each token (PPO); sequence: the geometric mean over the response (GSPO, whose clip "
            "range is far smaller: about 3e-4)"
        ),
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(default=False, description="KL loss against the reference model")
    kl_loss_coef: float = Field(default=0.0, ge=0, description="weight of the KL loss (k3 estimator)")
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the KL penalty in the reward: log-prob of the response at the engine minus the reference's; "
            "not together with kl_loss_coef"
        ),
    )
    use_tis: bool = Field(
        default=False,
        description="truncated importance sampling: correct for engine weights that are older than the trainer's",
    )
    tis_clip: float = Field(default=2.0, gt=0, description="upper bound of the importance weight")
    tis_clip_low: float = Field(default=0.0, ge=0, description="lower bound of the importance weight")
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description=(
            "importance weight of a token alone, of its whole response (product of the ratios), or their geometric mean"
        ),
    )
    tis_mode: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="weights outside of the bounds are cut to them, or masked: such tokens (responses) carry no loss",
    )
    use_rollout_logprobs: bool = Field(
        default=False, description="take the engine's log-probs as the old log-probs of the ratio"
    )
    keep_old_actor: bool = Field(
        default=False,
        description=(
            "take old log-probs from the weights last published, of which workers keep a copy; for max_staleness 0"
        ),
    )
    true_on_policy_mode: bool | None = Field(
        default=None,
        description=(
            "the policy in each update is its own old policy: ratio 1, no further forward pass; "
            "default: in mode fully_async with one update a step, unless other old log-probs are asked for"
        ),
    )
    filter_zero_variance: bool = Field(
        default=False, description="drop groups whose samples all earned the same (DAPO dynamic sampling)"
    )
    refill: bool = Field(default=True, description="replace filtered groups until the batch is full")
    max_gen_batches: Positive = Field(
        default=10, description="generation batches that one step may use up before it stops with the counts"
    )


class OptimizerSection(Section):
    """Adam with decoupled weight decay that spares norms."""

    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the end of the decay")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="shape of the decay after the warm-up"
    )
    lr_warmup_steps: NonNegative = Field(default=0, description="steps of linear warm-up")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay; norms and biases are spared")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="first moment decay")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="second moment decay")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam epsilon")
    clip_grad: float = Field(default=1.0, ge=0, description="gradient norm clip; 0 = off")
    global_batch_size: Positive | None = Field(
        default=None, description="samples of one optimizer update; default: all samples of a step"
    )


class WarmStartSection(Section):
    """A supervised phase before RL, on the same workers."""

    steps: NonNegative = Field(default=0, description="supervised steps; 0 = off")
    data: str | None = Field(default=None, description="JSONL file with prompt and response")
    batch_size: Positive = Field(default=128, description="sequences of a supervised step")
    lr: float = Field(default=1e-3, gt=0, description="learning rate of the supervised phase")
    lr_warmup_steps: NonNegative = Field(default=30, description="steps of linear warm-up")
    weight_decay: float = Field(default=0.01, ge=0, description="weight decay of the supervised phase")


class EvalSection(Section):
    """Evaluation on held-out prompts, with the weights that were just published."""

    eval_interval: Positive | None = Field(
        default=None, description="evaluate after every E-th step; also at epoch ends"
    )
    eval_prompt_data: str | None = Field(default=None, description="JSONL file of held-out prompts")
    max_prompts: Positive | None = Field(default=None, description="use the first so many prompts")
    sampled: bool = Field(default=True, description="also evaluate at the sampling temperature (greedy is always done)")
    skip_eval_before_train: bool = Field(default=False, description="no evaluation before the first step")
    eval_at_end: bool = Field(default=False, description="evaluate after the last step too")
    logprob_check_samples: NonNegative = Field(
        default=32, description="samples whose log-probs the trainer recomputes at each evaluation; 0 = off"
    )
    eval_engines: Positive | Literal["shared"] = Field(
        default="shared",
        description="engines set apart for evaluation, the last so many; shared = all do both, evaluation first",
    )


class EngineSection(Section):
    """The inference engines. Each has a sidecar beside it."""

    kind: Literal["embedded", "sglang", "attach"] = Field(
        default="embedded", description="embedded; a real SGLang server that we launch; or one that runs already"
    )
    num_engines: Positive = Field(default=1, description="engines to launch")
    url: tuple[str, ...] = Field(default=(), description="kind attach: base URLs of SGLang servers that run already")
    sidecar_url: tuple[str, ...] = Field(
        default=(), description="sidecars that run already, on other nodes say; then nothing is launched here"
    )
    python: str | None = Field(default=None, description="kind sglang: the interpreter of SGLang's environment")
    args: tuple[str, ...] = Field(default=(), description="kind sglang: further arguments of launch_server")
    env: dict[str, str] = Field(default_factory=dict, description="kind sglang: further environment variables")
    tensor_parallel_size: Positive = Field(default=1, description="kind sglang: tensor parallel size of one engine")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device of the engines")
    gpu_ids: tuple[int, ...] = Field(
        default=(), description="CUDA devices of the engines; default: those after the workers'"
    )
    dtype: Literal["fp32", "bf16"] | None = Field(
        default=None, description="type of the weights in the engine; default model.dtype"
    )
    port: NonNegative = Field(default=0, description="port of the first engine; 0 = the system chooses")
    sidecar_port: NonNegative = Field(default=0, description="port of the first sidecar; 0 = the system chooses")
    context_length: Positive | None = Field(
        default=None, description="prompt and completion together; default the model's"
    )
    max_running_requests: Positive = Field(default=1024, description="sequences that an engine decodes at once")
    rollout_engine_init_timeout: Seconds = Field(default=3600.0, description="how long an engine may take to come up")
    health_interval_s: Seconds = Field(default=5.0, description="pause between two health probes")
    health_failures: Positive = Field(
        default=3, description="consecutive failed probes after which an engine counts as dead"
    )
    min_healthy_engines: Positive = Field(default=1, description="the run stops when fewer are left")
    use_fault_tolerance: bool = Field(
        default=False, description="restart engines that died, and train on meanwhile; off: the run stops"
    )
    recovery_timeout_s: Seconds = Field(
        default=600.0,
        description="use_fault_tolerance: how long fewer than min_healthy_engines may serve before the run stops",
    )
    generation_probe_s: Seconds = Field(
        default=120.0,
        description=(
            "an engine that finishes nothing for so long is asked for one token, and must answer in the same time, "
            "else the probe has failed; longer than requests wait in a full queue"
        ),
    )


class CheckpointSection(Section):
    """Checkpoints of model, optimizer, data position and versions."""

    save_interval: Positive | None = Field(
        default=None, description="save after every S-th step and after the last; default: only after the last"
    )
    keep: Positive = Field(default=2, description="checkpoints to keep")
    on_save_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="what a checkpoint that can't be written does: end the run, or warn; the last good one stays",
    )
    export_hf: bool = Field(default=True, description="export the final policy as a Hugging Face directory")


class NetworkSection(Section):
    """Interfaces and ports of the control plane. RPC has no authentication: keep it on a private network."""

    interface: str = Field(default="lo", description="network interface of RPC, gloo and the rendezvous store")
    allow_public_address: bool = Field(
        default=False, description="let the interface have a public address: only behind a firewall"
    )
    master_addr: str = Field(default="127.0.0.1", description="address of node 0")
    master_port: NonNegative = Field(default=0, description="port of the rendezvous store; 0 = the system chooses")
    nnodes: Positive = Field(default=1, description="nodes of the job")
    rpc_timeout_s: Seconds = Field(default=1800.0, description="deadline of one collective call to the workers")
    start_timeout_s: Seconds = Field(default=300.0, description="how long workers may take to join")


class ObservabilitySection(Section):
    """What is written and shown."""

    progress: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="progress display; auto: rich on a terminal, else plain lines"
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard files")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level in events.jsonl"
    )
    samples_per_step: NonNegative = Field(default=4, description="samples written to samples.jsonl at each step")


class Config(Section):
    """A whole recipe."""

    # Ranks count up from it, and numpy, whose generator Megatron seeds too, takes no more than 32 bits.
    seed: NonNegative = Field(default=0, le=2**31 - 1, description="seed of data order, initial weights and sampling")
    mode: Literal["sync", "hybrid", "fully_async"] = Field(
        default="hybrid",
        description=(
            "sync: generate, train, publish; hybrid: engines run ahead, publication "
            "between partitions; fully_async: in-flight requests live through a "
            "publication"
        ),
    )
    run: RunSection = RunSection()
    prepare: PrepareSection = PrepareSection()
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    warm_start: WarmStartSection = WarmStartSection()
    publication: PublicationSection = PublicationSection()
    eval: EvalSection = EvalSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    network: NetworkSection = NetworkSection()
    observability: ObservabilitySection = ObservabilitySection()
