"""Where the engines of a run are, while it lives and after it died: for `resume-rollout` and for the start of a run.

| engine | its sidecar | what is done |
|---|---|---|
| launched by the run | answers | ends go to it |
| launched by the run | gone | nothing: the kernel ended the engine with its sidecar |
| attached (engine.url) | gone | an owed end goes to the engine itself: /continue_generation |
| elsewhere (engine.sidecar_url) | doesn't answer | unknown, so it counts as paused |
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from hybridasync.config.load import read_toml, validate
from hybridasync.config.models import Config
from hybridasync.config.resolved import FILE_NAME as CONFIG_FILE
from hybridasync.drivers.resume_rollout import Orders, Report, resume_engines
from hybridasync.errors import CompensationFailed, ConfigError, EngineError, NotSent, Rejected
from hybridasync.ports import Sidecar
from hybridasync.protocol.debts import Debts
from hybridasync.runtime import lock
from hybridasync.runtime.token import TOKEN_VARIABLE, read_token
from hybridasync.sidecar.engine_client import EngineClient
from hybridasync.transport.journal import JournalFile
from hybridasync.transport.sidecar import SidecarClient
from hybridasync.types import PauseMode, SidecarState, SidecarStatus

CALL_TIMEOUT_S = 6.0
"""For one call: three attempts and the pauses between them stay within `resume_budget_s` (20 s)."""

STATUS_TIMEOUT_S = 12.0
"""A sidecar asks its engine two things, 5 s each, before it answers."""

JOURNAL_FILE = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: look only (`dry_run`), or go as far as killing engines and ending others' pauses."""

    dry_run: bool = False
    force: bool = False
    token: str | None = None  # None: of the environment, or the one that the run left


async def resume_run(run_dir: Path, request: Request) -> list[Report]:
    """The engines of a run directory. Only looks while the run lives, unless forced.

    Raises ConfigError when the directory holds no run, or a journal that can't be read.
    """
    config = _config_of(run_dir)
    async with AsyncExitStack() as stack:
        live = ""
        try:
            stack.enter_context(lock.hold(run_dir))
        except ConfigError:
            owner = lock.holder(run_dir)
            live = f"left: the run is alive (process {owner.pid})" if owner else "left: the run is alive"
        careful = replace(request, dry_run=request.dry_run or bool(live and not request.force))
        return await _settle(config, run_dir, careful, reserve=live)


async def resume_sidecars(urls: Sequence[str], request: Request) -> list[Report]:
    """The engines of these sidecars, whoever paused them: naming one is the order to end its pause."""
    token = request.token or os.environ.get(TOKEN_VARIABLE, "")
    if not token.strip():
        raise ConfigError("set it to the sidecars' secret, or give --token-file", setting=TOKEN_VARIABLE)
    orders = Orders(
        scope="nothing" if request.dry_run else "all", force=request.force and not request.dry_run, reserve="would end"
    )
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(url, url, token)) for url in urls]
        return await resume_engines([(client, orders) for client in clients])


async def settle_debts(config: Config, run_dir: Path) -> list[Report]:
    """At the start of a run: end what an earlier one left open in this directory, before anything else.

    Raises CompensationFailed naming the engines that may still be paused on behalf of that run, ConfigError when the
    journal can't be read.
    """
    journal = JournalFile(run_dir / JOURNAL_FILE)
    if not _replayed(journal, run_dir).open:
        return []
    reports = await _settle(config, run_dir, Request())
    left = sorted(_replayed(journal, run_dir).owed())
    if left:
        raise CompensationFailed(left)
    return [report for report in reports if report.settled]


async def _settle(config: Config, run_dir: Path, request: Request, *, reserve: str = "") -> list[Report]:
    journal = JournalFile(run_dir / JOURNAL_FILE)
    debts = _replayed(journal, run_dir)
    token = request.token or os.environ.get(TOKEN_VARIABLE) or read_token(run_dir)
    work: list[tuple[Sidecar, Orders]] = []
    with contextlib.closing(journal):
        async with AsyncExitStack() as stack:
            for index in _indices(config, debts):
                name = f"engine-{index}"
                sidecar = await stack.enter_async_context(_control(config, run_dir, index, token=token))
                owed = tuple(debt.txn for debt in debts.open if debt.engine == name)
                work.append((sidecar, _orders(owed, request, reserve=reserve)))
            reports = await resume_engines(work)
        for report, (_, orders) in zip(reports, work, strict=True):
            for txn in orders.owed:
                how = report.settled.get(txn)
                if how is None and not request.dry_run and report.after is not None and report.after.state == "down":
                    how = report.settled[txn] = "gone"  # a pause lives in the engine's process
                if how is not None:
                    journal.append(debts.settle(report.engine, txn, how))
    return reports


def _indices(config: Config, debts: Debts) -> list[int]:
    """Of the recipe's engines, and of others that something is owed to: a resumed run may have fewer."""
    owed = {int(name.removeprefix("engine-")) for name in debts.owed() if name.removeprefix("engine-").isdecimal()}
    return sorted(owed | set(range(engine_count(config))))


def _client(name: str, url: str, token: str) -> SidecarClient:
    return SidecarClient(name, url, token, timeout_s=CALL_TIMEOUT_S, status_timeout_s=STATUS_TIMEOUT_S)


def _replayed(journal: JournalFile, run_dir: Path) -> Debts:
    try:
        return Debts.replay(journal.replay())
    except OSError as error:
        raise ConfigError(
            f"can't read {run_dir / JOURNAL_FILE}, which says what is owed: {error.strerror}; resume its engines by "
            "name with hybridasync resume-rollout --sidecar URL",
            setting="--run-dir",
        ) from error


def _orders(owed: tuple[str, ...], request: Request, *, reserve: str) -> Orders:
    if request.dry_run:
        plan = "would end" if owed or request.force else "left: not of this run (see --force)"
        return Orders(owed, "nothing", reserve=reserve or plan)
    return Orders(
        owed, "all" if request.force else "owed", force=request.force, reserve="left: not of this run (see --force)"
    )


def engine_count(config: Config) -> int:
    """Engines of the recipe, wherever they run."""
    return len(config.engine.sidecar_url) or len(config.engine.url) or config.engine.num_engines


def _config_of(run_dir: Path) -> Config:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} holds no run ({CONFIG_FILE} is missing)", setting="--run-dir")
    return validate(read_toml(path), source=str(path))


@asynccontextmanager
async def _control(config: Config, run_dir: Path, index: int, *, token: str) -> AsyncIterator[Sidecar]:
    """Whoever can speak for the engine: its sidecar, or what stands in for one that is gone."""
    name = f"engine-{index}"
    elsewhere = bool(config.engine.sidecar_url)
    if index >= engine_count(config) and (elsewhere or config.engine.kind == "attach"):
        yield UnlistedEngine(name, config.engine.kind)
        return
    url = config.engine.sidecar_url[index] if elsewhere else _announced(run_dir, index)
    if url is not None:
        async with _client(name, url, token) as client:
            if elsewhere or await _is_there(client):
                yield client
                return
    if config.engine.kind == "attach":
        engine = BareEngine(name, config.engine.url[index])
        try:
            yield engine
        finally:
            await engine.aclose()
    else:
        yield GoneEngine(name, config.engine.kind)


def _announced(run_dir: Path, index: int) -> str | None:
    """Where the run's own sidecar listens; None if there is none, or its process has ended (its port may be reused)."""
    try:
        announced = json.loads((run_dir / "logs" / f"sidecar-{index}.json").read_text())
        return str(announced["url"]) if psutil.pid_exists(int(announced["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _is_there(client: SidecarClient) -> bool:
    """False where nobody listens. A stranger that took over the port refuses the token: not our sidecar either."""
    try:
        await client.status()
    except NotSent:
        return False
    except Rejected as error:
        return error.status not in (401, 404)
    except EngineError:
        return True
    return True


class GoneEngine:
    """Implements Sidecar for an engine that has ended with the sidecar that launched it."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._kind = kind

    async def status(self) -> SidecarStatus:
        return _status_of("", self._kind, "down", detail="ended with its sidecar")

    async def pause(self, txn: str, mode: PauseMode, lease_s: float) -> bool:
        raise Rejected(self.name, "pause", 424, detail="the engine has ended")

    async def renew(self, txn: str, lease_s: float) -> None:
        raise Rejected(self.name, "renew", 409, detail="the engine has ended")

    async def end(self, txn: str | None) -> None:
        """Its pause has ended with it."""

    async def recover(self, timeout_s: float) -> None:
        raise Rejected(self.name, "recover", 409, detail="its sidecar has ended")

    async def fence(self, txns: Sequence[str] = ()) -> None:
        """It is fenced already."""


class BareEngine(GoneEngine):
    """Implements Sidecar for an attached engine whose sidecar is gone: its pause is ended at the engine itself."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, "attach")
        self._url = url
        self._client = EngineClient(name, url, control_timeout_s=CALL_TIMEOUT_S)

    async def status(self) -> SidecarStatus:
        try:
            ready = await self._client.ready()
        except NotSent as error:
            if not isinstance(error.__cause__, httpx.ConnectError):
                raise  # a host that is slow to answer may still hold a paused engine
            return _status_of(self._url, "attach", "down", detail=str(error))
        version = await self._client.weight_version()
        state: SidecarState = "running" if ready else "paused"
        return _status_of(self._url, "attach", state, version=version, detail="its sidecar is gone")

    async def end(self, txn: str | None) -> None:
        await self._client.resume()

    async def fence(self, txns: Sequence[str] = ()) -> None:
        raise Rejected(self.name, "fence", 409, detail=f"restart the engine at {self._url} by hand")

    async def aclose(self) -> None:
        await self._client.aclose()


class UnlistedEngine(GoneEngine):
    """Implements Sidecar for an engine elsewhere that the settings don't name any more. Forced, it is forgotten."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name, kind)
        self._forgotten = False

    async def status(self) -> SidecarStatus:
        if not self._forgotten:
            raise self._unknown("status")
        return _status_of("", self._kind, "down", detail="forgotten")

    async def end(self, txn: str | None) -> None:
        raise self._unknown("end")

    async def fence(self, txns: Sequence[str] = ()) -> None:
        self._forgotten = True

    def _unknown(self, operation: str) -> NotSent:
        where = (
            "the settings don't say any more where it is: end its pause with --sidecar URL, then forget it with --force"
        )
        return NotSent(self.name, operation, where)


def _status_of(
    url: str, kind: str, state: SidecarState, *, version: str | None = None, detail: str = ""
) -> SidecarStatus:
    return SidecarStatus(
        engine_url=url,
        engine_kind=kind,
        state=state,
        weight_version=version,
        txn=None,
        holder=None,
        since=None,
        lease_left_s=None,
        torn=False,
        healthy=state != "down",
        detail=detail,
    )
