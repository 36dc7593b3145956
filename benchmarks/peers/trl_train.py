"""TRL's GRPOTrainer on a folder of hybridasync's making: model/, train.jsonl, eval.jsonl. Runs in TRL's environment.

Writes one line of JSON to stdout: seconds of each step, samples of a step, accuracy before and after, start-up.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        options.folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    train, held = (_rows(options.folder / f"{name}.jsonl") for name in ("train", "eval"))
    before = accuracy(model, tokenizer, held, options)
    batch = options.prompts * options.samples
    with tempfile.TemporaryDirectory() as output:
        clock = Clock()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score_of(options, tokenizer),
            args=arguments(options, output),
            train_dataset=Dataset.from_list(train),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    found = {
        "step_s": [after - before_ for before_, after in zip(clock.at, clock.at[1:], strict=False)],
        "samples_per_step": batch,
        "samples": batch * options.steps,
        "start_s": clock.at[0] - STARTED,
        "accuracy_before": before,
        "accuracy": accuracy(model, tokenizer, held, options),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def arguments(options: argparse.Namespace, output: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.prompts * options.samples // options.micro_batch,
        num_generations=options.samples,
        max_completion_length=options.max_new,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup,
        adam_beta2=0.95,
        weight_decay=0.0,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=options.steps,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step began, and the last one ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.at:
            self.at.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append(time.perf_counter())


def correct(task: str, text: str, ended: bool, label: str) -> float:
    """As hybridasync's rewards: the whole answer, or for sums the last number of an answer that ended."""
    if task == "sort":
        return float(ended and text == label)
    numbers = re.findall(r"-?\d+", text)
    return float(ended and bool(numbers) and numbers[-1] == label)


def score_of(options: argparse.Namespace, tokenizer: Any) -> Any:
    def score(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        rows = zip(completions, completion_ids, label, strict=True)
        return [correct(options.task, text, ids[-1] == tokenizer.eos_token_id, gold) for text, ids, gold in rows]

    return score


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], options: argparse.Namespace) -> float:
    """Greedy, over the held-out prompts."""
    right = 0.0
    model.eval()
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        inputs = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=options.max_new, do_sample=False)
        for row, ids in zip(part, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in ids
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right += correct(options.task, text, ended, row["label"])
    model.train()
    return right / len(rows)


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=("sort", "sums"), required=True)
    for name in ("prompts", "samples", "steps", "max-new", "micro-batch", "warmup", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
