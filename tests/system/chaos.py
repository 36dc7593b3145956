"""One run that is struck again and again: each process, at each phase of a publication, with SIGKILL and SIGSTOP.

A cell begins and ends with a run that trains. What was struck and ended is started again (`--resume`), so that the next
cell is also the proof that the one before went on exactly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.system.gate import Gate, Hold, Point
from tests.system.own_phases import OwnPhases
from tests.system.rollout_side import TOKEN, RolloutSide
from tests.system.whole_run import ENVIRONMENT, HYBRIDASYNC, rows

from hybridasync.observability.process import ProcessId, descendants, wait_ended
from hybridasync.protocol.debts import INCURRED, Debts
from hybridasync.transport.journal import JournalFile

BATCH, SAMPLES = 2, 2
LEASE_S = 4.0
BUDGET_S = 15.0

RECIPE: dict[str, dict[str, object]] = {
    "rollout": {
        "num_rollout": 100_000,  # never reached
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": SAMPLES,
        "max_response_tokens": 4,
        "max_staleness": 1,
        "max_retries": 5,
    },
    "reward": {"function": "exact_match"},
    "algorithm": {"filter_zero_variance": False, "use_tis": True},
    "optimizer": {"lr_warmup_steps": 0},
    "checkpoint": {"save_interval": 1, "export_hf": False},
    "observability": {"samples_per_step": 1000, "progress": "off", "tensorboard": False},
    "publication": {
        "lease_s": LEASE_S,
        "resume_budget_s": BUDGET_S,
        "rollout_http_timeout": 6.0,
        "drain_timeout_s": 30.0,
    },
    "engine": {
        "use_fault_tolerance": True,
        "health_interval_s": 1.0,
        "health_failures": 2,
        "generation_probe_s": 4.0,
        "recovery_timeout_s": 90.0,
    },
}
"""The smallest run: a step takes some tenths of a second, and everything is over within seconds."""

PROGRAMS = {
    "rank0": ("hybridasync.runtime.rank", "0"),
    "worker": ("hybridasync.runtime.rank", "1"),
    "sidecar": ("hybridasync.sidecar", None),
    "engine": ("hybridasync.engine", None),
}
"""Module, and RANK in the environment."""

WHO = ("launcher", "rank0", "worker", "sidecar", "engine")
PAUSE, LOAD, CHECK, END = ("/v1/pause",), ("/update_weights_from_disk",), ("/weights_checker",), ("/v1/end",)
STAGE, SWITCH = ("/stage_weights",), ("/switch_weights",)
PHASES = {
    "before pause": Point(PAUSE, passed_on=False),
    "pause sent": Point(PAUSE, passed_on=True),
    "paused": Point(LOAD, passed_on=False),
    "mid-transfer": Point(LOAD, passed_on=True),
    "flipped": Point(CHECK, passed_on=False),
    "end sent": Point(END, passed_on=True),
}
"""Where each phase begins, as the relay sees it. `before pause` begins with the export already, see `reach`."""

SWITCHING = {
    "staging": Point(STAGE, passed_on=True),
    "before switch": Point(SWITCH, passed_on=False),
    "switch sent": Point(SWITCH, passed_on=True),
}
"""The same where engines switch between two tokens."""

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}

STOPPED_S = {"launcher": 3.0, "rank0": LEASE_S + 2.0, "worker": 3.0, "sidecar": 2.0, "engine": 60.0}
"""How long a stopped process stays so. Rank 0: past its leases. An engine: until the policy has put another in its
place, at the latest. The others less than any deadline: the run must not even notice."""

ENDS = {
    "launcher": (-9, "stopped by SIGTERM"),
    "rank0": (1, "the controller ended"),
    "worker": (1, "worker rank 1"),
}
"""Who takes the run along when killed: exit code, and what the terminal says. The others are borne."""

SUPERVISOR_S = 0.5
REACH_S, ENDED_S, GOES_ON_S, NOTHING_LEFT_S = 60.0, 60.0, 120.0, 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    who: str
    phase: str
    signal: str

    def __str__(self) -> str:
        return f"{self.who}/{self.phase}/{self.signal}"


@dataclass(slots=True)
class Verdict:
    """What became of a cell. Times in seconds."""

    cell: Cell
    code: int | None = None  # of the run, where it ended
    ended_s: float = 0.0  # from the signal to the end of the run and of everything that it started
    paused_s: float = 0.0  # the longest pause of an engine
    mute_s: float = 0.0  # the longest that an engine lived without answering
    fenced: int = 0  # engines that are other processes now
    left: int = 0
    went_on: str = ""
    took_s: float = 0.0
    problem: str = ""


class CellError(Exception):
    """A cell isn't what it must be."""


class World:
    """The rollout side, the relay before it, and one run at a time in `folder / run`.

    `engines` 0: the run has an engine and a sidecar of its own, and there is no relay. `staged`: engines prepare
    weights and switch to them; else each publication pauses them.
    """

    def __init__(self, folder: Path, *, engines: int = 2, staged: bool = False) -> None:
        self._engines = engines or 1
        self._staged = staged
        self.folder = folder
        self.run_dir = folder / "run"
        self.side = RolloutSide(folder / "rollout", engines)
        self.gate = Gate([node.url for node in self.side.nodes])
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._members: set[ProcessId] = set()

    def __enter__(self) -> World:
        self.side.__enter__()
        self.gate.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self.process is not None and self.process.poll() is None:
                self._members |= descendants(self.process.pid)
                self.process.terminate()
                self.ended()
        finally:
            self.gate.__exit__(*error)
            self.side.__exit__(*error)

    # The run

    def start(self, **sections: dict[str, object]) -> None:
        """Begin, or go on at the last checkpoint; returns at once."""
        resume = (self.run_dir / "config.resolved.toml").exists()
        if resume:
            arguments = ["--resume", str(self.run_dir)]
        else:
            recipe = self.folder / "recipe.toml"
            recipe.write_text(self._recipe(sections))
            arguments = [str(recipe), "--run-dir", str(self.run_dir)]
        self._starts += 1
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [HYBRIDASYNC, "train", *arguments],
                cwd=self.folder,
                env=ENVIRONMENT | {"HYBRIDASYNC_TOKEN": TOKEN},
                stdout=output,
                stderr=output,
            )
        self._members = {ProcessId.of(self.process.pid)}

    def _recipe(self, sections: dict[str, dict[str, object]]) -> str:
        task = self.side.task
        places: dict[str, dict[str, object]] = {
            "publication": {"staged": self._staged},
            "model": {"hf_checkpoint": str(task / "model")},
            "data": {"prompt_data": str(task / "train.jsonl")},
        }
        if self.gate.relays:
            places["engine"] = {"sidecar_url": [relay.url for relay in self.gate.relays]}
        values: dict[str, Any] = {}
        for source in (RECIPE, places, sections):
            for name, settings in source.items():
                values[name] = values.get(name, {}) | settings
        # JSON's notation of these values is TOML's.
        tables = (
            "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())])
            for name, settings in values.items()
        )
        return "\n".join(tables)

    @property
    def output(self) -> Path:
        return self.folder / f"output-{self._starts}.txt"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of one of the run's files."""
        return rows(self.run_dir / f"{name}.jsonl")

    def steps(self) -> int:
        return len(self.rows("metrics"))

    def published(self) -> int:
        """Publications that every engine has, since the beginning."""
        done = [row for row in self.rows("events") if row["event"] == "publication.completed"]
        return sum(len(row.get("engines", ())) == self._engines for row in done)

    def pid(self, who: str) -> int:
        assert self.process is not None
        if who == "launcher":
            return self.process.pid
        if self.side.nodes and who == "sidecar" and (sidecar := self.side.nodes[0].process) is not None:
            return sidecar.pid
        if self.side.nodes and who == "engine" and (engine := self.side.engines[0]) is not None:
            return engine[1].pid
        module, rank = PROGRAMS[who]
        for member in descendants(self.process.pid):
            with suppress(psutil.Error):
                process = psutil.Process(member.pid)
                if module in process.cmdline() and rank in (None, process.environ().get("RANK")):
                    return member.pid
        raise CellError(f"there is no {who}")

    def until(self, condition: Callable[[], bool], limit_s: float, what: str, *, alive: bool = True) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if alive and not self.alive:
                raise CellError(f"the run ended before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise CellError(f"not within {limit_s:g} s: {what}\n{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        events = [json.dumps(row) for row in self.rows("events")[-12:]]
        return "\n".join([*self.output.read_text(errors="replace").splitlines()[-12:], *events])

    def trains(self, more: int = 2) -> None:
        """The run is there, and makes further steps and a publication that reaches every engine."""
        if not self.alive:
            self.start()
        steps, published = self.steps(), self.published()
        if not self._resumed():  # rows after the checkpoint are dropped first
            self.until(self._resumed, GOES_ON_S, "the run goes on")
            steps = self.steps()
        # The first may have been under way, and its engine lost since then: the second proves that it serves.
        self.until(lambda: self.steps() >= steps + more and self.published() >= published + 2, GOES_ON_S, "it goes on")
        self.side.look()

    def _resumed(self) -> bool:
        begun = [row for row in self.rows("events") if row["event"] in ("publication.completed", "resumed", "pid")]
        return bool(begun) and (self._starts == 1 or self._count("resumed") >= self._starts - 1)

    def _count(self, event: str) -> int:
        return sum(row["event"] == event for row in self.rows("events"))

    def ended(self) -> int:
        """Its exit code, once it and everything that it started has ended."""
        assert self.process is not None
        try:
            code = self.process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise CellError(f"the run didn't end within {ENDED_S:g} s\n{self.tail()}") from None
        return code

    def left_behind(self) -> set[ProcessId]:
        """Processes of the run that outlive it."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(str(self.run_dir) in word for word in process.cmdline()):
                    self._members.add(ProcessId(process.pid, process.create_time()))
        return wait_ended(self._members, NOTHING_LEFT_S)

    # Phases

    def reach(self, phase: str) -> Hold | None:
        """Wait until the next publication is there. The caller lets it go on."""
        if not self.gate.relays:
            self._reach_own(phase)
            return None
        folder, before = self.run_dir / "weights", self._exports()
        hold = self.gate.arm((PHASES | SWITCHING)[phase])
        deadline = time.monotonic() + REACH_S
        while not hold.reached.wait(0.002):
            if phase == "before pause" and folder.is_dir() and self._exports() > before:
                return hold  # the export is under way; the pause won't be passed on before the signal
            if not self.alive or time.monotonic() > deadline:
                self.let_go_on(hold)
                raise CellError(f"{phase} never came\n{self.tail()}")
        return hold

    def let_go_on(self, hold: Hold | None) -> None:
        if hold is not None:
            self.gate.release(hold)

    def _reach_own(self, phase: str) -> None:
        phases, deadline = OwnPhases(self.run_dir, phase, TOKEN), time.monotonic() + REACH_S
        try:
            while not phases.reached():
                if not self.alive or time.monotonic() > deadline:
                    raise CellError(f"{phase} never came\n{self.tail()}")
                time.sleep(0.001)
        finally:
            phases.close()

    def _exports(self) -> str:
        return max((path.name for path in (self.run_dir / "weights").glob("version-*")), default="")

    # Exactness

    def check_exact(self) -> None:
        """Steps without a gap or a repetition; each prompt once, with all its samples, and none left out."""
        metrics = [row["step"] for row in self.rows("metrics")]
        if metrics != list(range(len(metrics))):
            raise CellError(f"steps aren't 0, 1, 2, …: {metrics}")
        whole = len(metrics) - 1  # the last one's samples may be half written
        uids = Counter(row["uid"] for row in self.rows("samples") if row["step"] < whole)
        wrong = {uid: count for uid, count in uids.items() if count != SAMPLES}
        due = range((whole - 2) * BATCH)  # by the staleness bound; later ones may still be in flight
        missing = [uid for uid in due if uid not in uids]
        if wrong or missing:
            raise CellError(f"prompts with other than {SAMPLES} samples: {wrong}, missing: {missing}, {whole} steps")

    def check_settled(self) -> None:
        """No resume is owed but in a publication that is just under way."""
        records = JournalFile(self.run_dir / "journal.jsonl").replay()
        newest = next((row["txn"] for row in reversed(records) if row["event"] == INCURRED), None)
        left = [debt for debt in Debts.replay(records).open if debt.txn != newest]
        if left:
            raise CellError(f"still owed: {left}, beside {newest}")


def strike(world: World, cell: Cell) -> Verdict:
    """Carry out one cell. `problem` is empty when all is as it must be."""
    verdict, started = Verdict(cell), time.monotonic()
    try:
        _strike(world, cell, verdict)
    except CellError as error:
        verdict.problem = str(error)
    verdict.took_s = time.monotonic() - started
    return verdict


def _strike(world: World, cell: Cell, verdict: Verdict) -> None:
    if not world.alive:
        world.trains()
    world.side.reset()
    engines = list(world.side.engines)
    target = ProcessId.of(world.pid(cell.who))
    hold = world.reach(cell.phase)
    assert world.process is not None
    world._members |= descendants(world.process.pid)
    try:
        os.kill(target.pid, SIGNALS[cell.signal])
        if cell.who == "sidecar" and cell.signal == "KILL" and world.side.nodes:
            world.gate.refuse(0)
    finally:
        world.let_go_on(hold)
    waker = threading.Thread(target=_wake, args=(target, STOPPED_S[cell.who]))
    waker.start()
    try:
        if cell.signal == "KILL":
            _after_kill(world, cell, verdict)
        world.trains()
        verdict.went_on = "went on" if verdict.code is None else "resumed"
    finally:
        waker.join()
        verdict.paused_s = max((entry.paused for entry in world.side.standstill), default=0.0)
        verdict.mute_s = max((entry.mute for entry in world.side.standstill), default=0.0)
    verdict.fenced = sum(before != after for before, after in zip(engines, world.side.engines, strict=True))
    world.check_exact()
    world.check_settled()
    for node in world.side.nodes:
        status = node.wait_ready()
        if status["torn"]:
            raise CellError(f"left torn: {status}")
    if verdict.paused_s > LEASE_S + BUDGET_S:
        raise CellError(f"an engine was paused for {verdict.paused_s:.1f} s")


def _wake(target: ProcessId, after_s: float) -> None:
    """A stopped process goes on after a while, if it is still there."""
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and target.alive():
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        if target.alive():
            os.kill(target.pid, signal.SIGCONT)


def _after_kill(world: World, cell: Cell, verdict: Verdict) -> None:
    if cell.who == "sidecar" and world.side.nodes:
        node = world.side.nodes[0]
        node.kill()
        time.sleep(SUPERVISOR_S)
        node.start()
        world.gate.accept(0)
    elif cell.who in ENDS:
        _check_end(world, cell, verdict)


def _check_end(world: World, cell: Cell, verdict: Verdict) -> None:
    code, words = ENDS[cell.who]
    struck = time.monotonic()
    verdict.code = world.ended()
    left = world.left_behind()
    output = world.output.read_text(errors="replace")  # the controller's last word may come after the launcher's end
    verdict.left = len(left)
    verdict.ended_s = time.monotonic() - struck
    if left:
        raise CellError(f"left behind: {[process.find() for process in left]}")
    if verdict.code != code or words not in output or "Traceback" in output:
        raise CellError(f"exit code {verdict.code} instead of {code}, or not {words!r}:\n{output}")
