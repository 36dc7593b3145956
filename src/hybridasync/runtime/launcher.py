"""`hybridasync train` on one machine: start torchrun, pass signals on, restart, and leave no process behind.

The launcher holds no state of the run. The controller's exit code comes through the run directory (see `outcome`),
because torchrun makes a 1 of every failure. Nodes beyond one start torchrun themselves.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hybridasync.config.findings import say_changes
from hybridasync.config.models import Config
from hybridasync.config.pipeline import Resolved
from hybridasync.config.resolved import write_resolved
from hybridasync.errors import ConfigError
from hybridasync.observability.jsonl import complain
from hybridasync.observability.logs import EventLog
from hybridasync.observability.process import (
    ProcessId,
    child_environment,
    descendants,
    exit_name,
    in_sessions,
    log_tail,
    terminate,
    wait_ended,
)
from hybridasync.observability.report import write_report
from hybridasync.observability.summary import write_summary
from hybridasync.runtime import lock, outcome
from hybridasync.runtime.agent import FAILURES
from hybridasync.runtime.outcome import Outcome
from hybridasync.runtime.start import RANK_PROGRAM, listen
from hybridasync.transport.checkpoints import remove_unfinished
from hybridasync.transport.weights import remove_leftovers

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_CENSUS_S = 1.0
_AFTER_CONTROLLER_S = 5.0
"""Workers end by themselves when the controller does; one that hangs would keep torchrun waiting for ever."""

_STOP_S = 45.0
"""After a signal: the budget of the compensation, and torchrun's own 30 s before it kills its ranks."""

_LEAVE_S = 5.0
_TERMINATE_S = 3.0


def launch(resolved: Resolved, *, run_dir: Path, resume: bool, program: Sequence[str] = RANK_PROGRAM) -> int:
    """Run the job to its end; answers the exit code. For a process's main thread, which it gives signal handlers.

    A failure (code 1) is followed by up to run.max_restarts further starts, which go on at the last checkpoint.
    Raises ConfigError: a live run's directory, several nodes, network.master_port taken.
    """
    config = resolved.config
    if config.network.nnodes > 1:
        raise ConfigError(
            "is more than one: start `torchrun -m hybridasync.runtime.rank` on each node (docs/multi-node.md)",
            setting="network.nnodes",
        )
    lock.check_free(run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_resolved(config, run_dir)
    log = EventLog(run_dir / "events.jsonl", level=config.observability.log_level)
    say_changes(resolved.changes, log.event)
    log.close()
    with _receive_signals() as received:
        for start in range(config.run.max_restarts + 1):
            going_on = resume or (start > 0 and any((run_dir / "checkpoints").glob("step_*")))
            code = _Start(config, run_dir, received).run(going_on, program)
            if code != 1 or start == config.run.max_restarts:
                break
            _say(f"restart {start + 1} of {config.run.max_restarts}")
    return code


@contextmanager
def _receive_signals() -> Iterator[list[signal.Signals]]:
    received: list[signal.Signals] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Start:
    """One start of torchrun, from its first process to the end of its last."""

    def __init__(self, config: Config, run_dir: Path, received: list[signal.Signals]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._received = received
        self._passed_on: set[signal.Signals] = set()
        self._seen: set[ProcessId] = set()  # every process of the job that ever showed up
        self._controller: ProcessId | None = None
        self._give_up_at: float | None = None
        self._gave_up = False
        self._started = time.monotonic()

    def run(self, resume: bool, program: Sequence[str]) -> int:
        if self._received:
            return outcome.of_signal(self._received[0]).code
        outcome.clear(self._run_dir)
        listener = listen(self._config.network.master_addr, self._config.network.master_port)
        with (
            listener,
            subprocess.Popen(
                self._command(listener.fileno(), resume, program),
                env=child_environment(),
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on once
            ) as agent,
        ):
            listener.close()
            try:
                self._supervise(agent)
            finally:
                self._clear_up(agent)
        remove_unfinished(self._run_dir / "checkpoints")
        ended = outcome.read(self._run_dir)
        verdict = self._verdict(ended, agent.returncode)
        if verdict != ended:
            self._put_right(verdict, ended)
        return verdict.code

    def _command(self, descriptor: int, resume: bool, program: Sequence[str]) -> list[str]:
        log = self._run_dir / "logs" / "torchrun.log"
        agent = ["-m", "hybridasync.runtime.agent", "--listen-fd", str(descriptor), "--log", str(log), "--"]
        ranks = ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", str(self._config.parallel.num_workers + 1)]
        job = [*program, str(self._run_dir / "config.resolved.toml"), "--run-dir", str(self._run_dir)]
        return [sys.executable, *agent, *ranks, *job, *(["--resume"] if resume else [])]

    def _supervise(self, agent: subprocess.Popen[bytes]) -> None:
        census_at = 0.0
        while agent.poll() is None:
            now = time.monotonic()
            self._pass_signals_on(agent, now)
            if now >= census_at:
                self._count(agent, now)
                census_at = now + _CENSUS_S
            if self._give_up_at is not None and now >= self._give_up_at:
                return
            time.sleep(_POLL_S)

    def _pass_signals_on(self, agent: subprocess.Popen[bytes], now: float) -> None:
        """Each signal once: a repetition would hit the ranks in the middle of their compensation."""
        for number in tuple(self._received):
            if number not in self._passed_on:
                self._passed_on.add(number)
                self._count(agent, now)  # the controller may have come up since the last census
                # Before there is a controller to receive it, Python would answer SIGINT with an import's traceback.
                starting = number == signal.SIGINT and self._controller is None
                agent.send_signal(signal.SIGTERM if starting else number)
                self._set_limit(now + _STOP_S)
        repeated = len(self._received) - len(self._passed_on)
        if repeated > 0:
            del self._received[-repeated:]
            _say("stopping already: engines are being resumed")

    def _count(self, agent: subprocess.Popen[bytes], now: float) -> None:
        self._seen |= descendants(agent.pid)
        self._watch_controller(now)

    def _watch_controller(self, now: float) -> None:
        if self._controller is None:
            owner = lock.holder(self._run_dir)
            self._controller = owner if owner in self._seen else None
        elif not self._controller.alive():
            self._set_limit(now + _AFTER_CONTROLLER_S)

    def _set_limit(self, at: float) -> None:
        self._give_up_at = at if self._give_up_at is None else min(at, self._give_up_at)

    def _clear_up(self, agent: subprocess.Popen[bytes]) -> None:
        """End what is left. The controller is given time when torchrun was killed: it may owe engines a resume."""
        self._gave_up = agent.poll() is None
        if self._gave_up:
            terminate([ProcessId.of(agent.pid), *descendants(agent.pid)], grace_s=_TERMINATE_S)
        agent.wait()
        if self._controller is not None:
            wait_ended([self._controller], self._config.publication.resume_budget_s + _LEAVE_S)
        left = self._seen | in_sessions(process.pid for process in self._seen)  # ranks lead sessions
        terminate(wait_ended(left, _LEAVE_S), grace_s=_TERMINATE_S)

    def _verdict(self, ended: Outcome | None, agent_code: int) -> Outcome:
        """The controller's outcome, or a better one: it may have been killed, or not know why it was told to stop."""
        if ended is not None and ended.code in (0, 2, 3):
            return ended
        if self._received:
            by_signal = outcome.of_signal(self._received[0])
            return ended if ended is not None and ended.code == by_signal.code else by_signal
        if ended is None or ended.code > outcome.SIGNAL_EXIT:
            return Outcome(1, self._silent_end(ended, agent_code))
        return ended

    def _put_right(self, verdict: Outcome, ended: Outcome | None) -> None:
        """Say what the controller couldn't, and leave the run directory as it would have."""
        _say(verdict.message)
        if ended is None:
            remove_leftovers(self._run_dir, self._config.publication.weights_dir)
        wall_s = time.monotonic() - self._started
        write_summary(self._run_dir, status=verdict.status, wall_s=wall_s, extra=verdict.summary)
        write_report(self._run_dir)

    def _silent_end(self, ended: Outcome | None, agent_code: int) -> str:
        logs = self._run_dir / "logs"
        account = f"torchrun's own account is in {logs / 'torchrun.log'}"
        if agent_code < 0 and not self._gave_up:
            return f"torchrun was ended by {exit_name(agent_code)}, and the job with it; {account}"
        codes = _exit_codes(logs / FAILURES)
        if ended is None and (0 in codes or not codes):
            how = exit_name(codes[0]) if 0 in codes else "killed"
            memory = ", perhaps for memory" if how in ("killed", "SIGKILL") else ""
            return f"the controller ended without a word ({how}{memory}); {account}"
        workers = (f"worker rank {rank} ended with {exit_name(code)}" for rank, code in codes.items() if rank)
        tails = [f"{path.name}:\n{tail}" for path in sorted(logs.glob("worker-*.log")) if (tail := log_tail(path))]
        who = ", ".join(workers) or "a worker ended"
        return "\n".join([f"{who}, and torchrun stopped the job; {account}", *tails])


def _exit_codes(failures: Path) -> dict[int, int]:
    """By rank, of those that torchrun saw fail; empty if it couldn't write them down.

    One that ended by SIGTERM was asked to by torchrun, because of another.
    """
    try:
        codes = {int(rank): int(code) for rank, code in json.loads(failures.read_text()).items()}
    except (OSError, ValueError):
        return {}
    return {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes


def _say(text: str) -> None:
    complain(f"hybridasync: {text}")
