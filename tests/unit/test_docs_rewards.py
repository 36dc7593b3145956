"""The examples of docs/rewards.md load, and do what the text around them says."""

import re
import sys
from pathlib import Path

import pytest

from hybridasync.config.models import RewardSection
from hybridasync.rewards.registry import load_reward
from hybridasync.types import Completion, Prompt

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/rewards.md").read_text(), re.DOTALL)
PROMPT = Prompt(uid=0, row=0, epoch=0, source="toy", input_ids=(1,), text="2+3?", label="5")
DONE = Completion((5,), (-0.1,), (), "stop", "engine-0")
CUT = Completion((5,), (-0.1,), (), "length", "engine-0")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "documented_rewards.py").write_text("\n".join(BLOCKS))
    monkeypatch.delitem(sys.modules, "documented_rewards", raising=False)
    return "documented_rewards"


async def test_documented_reward_functions_run(examples: str) -> None:
    """The plain one scores by length and ending, the batched one ranks, the async one is accepted."""
    brevity = load_reward(RewardSection(function=f"{examples}:brevity"))
    assert await brevity(PROMPT, ["5", "6", "5"], [DONE, DONE, CUT]) == [0.999, -0.001, 0.0]
    ranked = load_reward(RewardSection(function=f"{examples}:ranked", batched=True))
    assert await ranked(PROMPT, ["5", "it is 5"], [DONE, DONE]) == [1.1, 0.0]
    load_reward(RewardSection(function=f"{examples}:judged"))
