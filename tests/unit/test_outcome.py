"""Exit codes and the launcher's environment: runtime/outcome.py, environment.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridasync.errors import CompensationFailed, ConfigError, TrainerError
from hybridasync.runtime import outcome
from hybridasync.runtime.environment import Environment, is_torchrun
from hybridasync.runtime.outcome import Outcome

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_worst_error_of_a_group_decides() -> None:
    """A failed compensation outranks a mistake, which outranks other failures, however deep in groups."""
    failed, mistake, other = CompensationFailed(["engine-0"]), ConfigError("no", setting="seed"), TrainerError("gone")
    inner = ExceptionGroup("inner", [other, mistake])
    assert outcome.of_error(other) == Outcome(1, "gone")
    assert outcome.of_error(inner) == Outcome(2, "seed: no")
    assert outcome.of_error(BaseExceptionGroup("", [inner, failed])).code == 3
    assert outcome.of_error(BaseExceptionGroup("", [KeyboardInterrupt()])).code == 130


def test_only_a_bug_is_shown_with_its_traceback() -> None:
    """What was foreseen is told in its own words, with its notes."""
    error = TrainerError("gone")
    error.add_note("On worker rank 1: …")
    assert outcome.of_error(error).message == "gone\nOn worker rank 1: …"
    bug = outcome.of_error(ZeroDivisionError("a bug"))
    assert bug.code == 1 and bug.message.endswith("ZeroDivisionError: a bug\n")


def test_outcome_travels_through_the_run_directory(tmp_path: Path) -> None:
    """What was written is read; nothing written, half written or cleared is None."""
    assert outcome.read(tmp_path) is None
    outcome.write(tmp_path, Outcome(3, "Failed to resume rollout on: é"))
    assert outcome.read(tmp_path) == Outcome(3, "Failed to resume rollout on: é")
    (tmp_path / outcome.FILE_NAME).write_text('{"co')
    assert outcome.read(tmp_path) is None
    outcome.clear(tmp_path)
    outcome.clear(tmp_path)
    assert outcome.read(tmp_path) is None


def test_workers_see_their_own_world() -> None:
    """Ranks are one lower than in the job, local ranks only on the controller's node."""
    place = Environment.read(TORCHRUN)
    assert (place.attempt, place.hosts_store) == (2, False)
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    assert place.for_megatron() == expected
    second = TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    assert Environment.read(second).for_megatron()["LOCAL_RANK"] == "0"


def test_environment_that_is_no_good_is_a_mistake() -> None:
    """Missing variables, words for numbers and a job without workers say so."""
    assert is_torchrun(TORCHRUN) and not is_torchrun({"RANK": "0"})
    with pytest.raises(ConfigError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"):
        Environment.read({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"no good.*'many'"):
        Environment.read(TORCHRUN | {"WORLD_SIZE": "many"})
    with pytest.raises(ConfigError, match=r"num_workers \+ 1"):
        Environment.read(TORCHRUN | {"WORLD_SIZE": "1"})


def test_an_outcome_reaches_the_launcher_from_a_full_disk(tmp_path: Path) -> None:
    """Where no new file can be written, the code and the message's beginning go where room was reserved."""
    outcome.reserve(tmp_path)
    assert outcome.read(tmp_path) is None
    (tmp_path / f"{outcome.FILE_NAME}.part").mkdir()  # in the way of the new file, as a full disk is
    outcome.write(tmp_path, Outcome(1, "\U0001f4be" * 5000))
    ended = outcome.read(tmp_path)
    assert ended is not None and ended.code == 1 and set(ended.message) == {"\U0001f4be"}
    assert (tmp_path / outcome.FILE_NAME).stat().st_size == outcome.RESERVED_BYTES
