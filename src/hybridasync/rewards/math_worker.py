"""The process that grades: `python -m hybridasync.rewards.math_worker`, one JSON request a line, one answer a line.

A request is {"label": …, "text": …}; without a text only the gold answer is checked. An answer is {"score": …} or
{"error": …}. The first line is the answer to a question of its own: the grader works here, and is warm. The process
ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import BinaryIO

from hybridasync.errors import RewardError
from hybridasync.observability.process import die_with_parent

FIRST = ("0.5", r"\frac{1}{2}")
"""Text and label that are equal by algebra alone."""


def main() -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us by closing the pipe
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not speak into the protocol
    from hybridasync.rewards import math_grader

    def answer(text: str | None, label: str) -> None:
        try:
            if text is None:
                math_grader.check_label(label)
            _say(answers, {"score": 0.0 if text is None else math_grader.score(text, label)})
        except RewardError as error:
            _say(answers, {"error": str(error)})

    answer(*FIRST)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer(request["text"], request["label"])


def _say(stream: BinaryIO, answer: dict[str, object]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
