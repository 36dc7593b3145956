"""`hybridasync sim`: play seeds of the virtual world, search the protocol, or show that the checks find wrong code."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from hybridasync.errors import ConfigError
from hybridasync_cli.show import errors_as_lines, say_error

if TYPE_CHECKING:
    from hybridasync.sim.exhaustive import Found
    from hybridasync.sim.scenario import Outcome

SHOWN_VIOLATIONS = 5


def sim(
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds to play.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first one. Alone: print its history.")] = 0,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", help="Only faults of: network, engines, updates, sidecars, controller, workers."),
    ] = None,
    mutate: Annotated[
        str | None, typer.Option("--mutate", help="Play with one wrong version of the code; the checks must find it.")
    ] = None,
    list_mutations: Annotated[bool, typer.Option("--list-mutations", help="Print the names of --mutate.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Instead of seeds: every order of events of the transaction protocol.")
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes. Default: one for each core.")] = None,
) -> None:
    """Play a run's faults on a virtual clock: real drivers and sidecars, simulated engines, network and trainer.

    \b
    hybridasync sim --seeds 100
    hybridasync sim --seed 7 --scenario engines
    hybridasync sim --exhaustive

    Exit code: 0 no promise was broken, 1 otherwise; the seed that breaks one is printed, and replays.
    """
    with errors_as_lines():
        from hybridasync.sim.mutations import MUTATIONS
        from hybridasync.sim.scenario import SCENARIOS

        if list_mutations:
            typer.echo("\n".join(MUTATIONS))
            return
        if scenario is not None and scenario not in SCENARIOS:
            raise ConfigError(f"unknown: {scenario!r}; there are {', '.join(SCENARIOS)}", setting="--scenario")
        if mutate is not None and mutate not in MUTATIONS:
            raise ConfigError(f"unknown: {mutate!r}; see --list-mutations", setting="--mutate")
        if exhaustive and (seeds != 1 or seed or scenario):
            raise ConfigError("it plays no seeds: leave --seeds, --seed and --scenario out", setting="--exhaustive")
        if not exhaustive:
            _need_trio()
    workers = jobs or len(os.sched_getaffinity(0))
    if exhaustive:
        raise typer.Exit(_search_all(mutate, workers))
    played = partial(_play, scenario=scenario, mutate=mutate)
    if seeds == 1:
        outcome = played(seed)
        typer.echo("\n".join(outcome.trace))
        raise typer.Exit(_tell([outcome]))
    numbers = range(seed, seed + seeds)
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(played, numbers, chunksize=8)
        outcomes = list(track(results, "playing", seeds, console=Console(stderr=True)))
    raise typer.Exit(_tell(outcomes))


def _play(seed: int, *, scenario: str | None, mutate: str | None) -> Outcome:
    from hybridasync.sim.mutations import mutated
    from hybridasync.sim.scenario import play

    logging.getLogger("hybridasync.sidecar").setLevel(logging.CRITICAL)  # its errors are the point here
    with mutated(mutate):
        return play(seed, scenario)


def _search_all(mutate: str | None, workers: int) -> int:
    """Largest scope first, so that the workers end at about the same time; shown in the order of the table."""
    from hybridasync.sim.exhaustive import SCOPES

    names = list(SCOPES)
    states = violations = 0
    with ProcessPoolExecutor(workers) as pool:
        searches = {name: pool.submit(_search, name, mutate=mutate) for name in reversed(names)}
        for name in names:
            found = searches[name].result()
            states += found.states
            typer.echo(f"{name}: {found.states} states, {found.transitions} transitions")
            if found.violation is not None:
                violations += 1
                say_error("\n  ".join([f"{name}: {found.violation}", *found.trace]))
    typer.echo(f"{states} states in all: {violations} scopes with a violation")
    return 1 if violations else 0


def _search(scope: str, *, mutate: str | None) -> Found:
    from hybridasync.sim.exhaustive import SCOPES, Search
    from hybridasync.sim.mutations import mutated

    with mutated(mutate):
        return Search(SCOPES[scope]).run()


def _tell(outcomes: list[Outcome]) -> int:
    broken = [outcome for outcome in outcomes if outcome.violations]
    for outcome in broken[:SHOWN_VIOLATIONS]:
        say_error(f"seed {outcome.seed}: {outcome.violations[0]} (hybridasync sim --seed {outcome.seed})")
    starts = sum(outcome.starts for outcome in outcomes)
    hours = sum(outcome.virtual_s for outcome in outcomes) / 3600
    typer.echo(f"{len(outcomes)} seeds, {starts} starts, {hours:.1f} virtual hours: {len(broken)} with violations")
    return 1 if broken else 0


def _need_trio() -> None:
    try:
        import trio  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ConfigError("the simulation needs trio: pip install 'hybridasync[sim]'") from error
