"""The process that grades: `python -m hybridasync.rewards.math_worker`, one JSON request a line, one answer a line.

A request is {"label": …, "text": …}; without a text only the gold answer is checked. An answer is {"score": …} or
{"error": …}. The first line says {"ready": true}. It ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import BinaryIO

from hybridasync.errors import RewardError
from hybridasync.observability.process import die_with_parent


def main() -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us by closing the pipe
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not speak into the protocol
    from hybridasync.rewards import math_grader

    _say(answers, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if request["text"] is None:
                math_grader.check_label(request["label"])
                _say(answers, {"score": 0.0})
            else:
                _say(answers, {"score": math_grader.score(request["text"], request["label"])})
        except RewardError as error:
            _say(answers, {"error": str(error)})


def _say(stream: BinaryIO, answer: dict[str, object]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
