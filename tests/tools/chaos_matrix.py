"""The chaos matrix: SIGKILL and SIGSTOP of each process of a run, at each phase of a publication.

    python -m tests.tools.chaos_matrix                      # 5 processes x 6 phases x 2 signals; 1 if a cell fails
    python -m tests.tools.chaos_matrix --staged             # x 3 phases, where engines switch instead of being paused
    python -m tests.tools.chaos_matrix --cells sidecar/paused/STOP,rank0 --repeat 3

A cell passes when no engine is paused for longer than its lease and the resume budget, no process is left, the run goes
on (or says why it ended, and `--resume` goes on), and every prompt was trained on exactly once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.system.chaos import PHASES, SIGNALS, SWITCHING, WHO, Cell, Verdict, World, strike

from hybridasync.observability.process import die_with_parent

HEADINGS = ("cell", "exit", "end s", "then", "paused s", "mute s", "fenced", "left", "took s", "verdict")
WIDTHS = (32, 5, 6, 8, 9, 7, 7, 5, 7, 7)


def chosen(words: Sequence[str], *, staged: bool) -> list[Cell]:
    """Cells that have every part of one of the words: `rank0`, `paused/STOP`, `engine/flipped/KILL`."""
    cells = [Cell(*place) for place in itertools.product(WHO, SWITCHING if staged else PHASES, SIGNALS)]
    if not words:
        return cells
    return [cell for cell in cells if any(set(word.split("/")) <= set(str(cell).split("/")) for word in words)]


def line(columns: Sequence[object]) -> str:
    return " ".join(f"{column!s:<{width}}" for column, width in zip(columns, WIDTHS, strict=True))


def row(verdict: Verdict) -> str:
    code = "-" if verdict.code is None else verdict.code
    seconds = [f"{value:.1f}" for value in (verdict.ended_s, verdict.paused_s, verdict.mute_s, verdict.took_s)]
    what = verdict.went_on or "-", "FAILED" if verdict.problem else "ok"
    columns = (
        verdict.cell,
        code,
        seconds[0],
        what[0],
        *seconds[1:3],
        verdict.fenced,
        verdict.left,
        seconds[3],
        what[1],
    )
    text = line(columns)
    return f"{text}\n    {verdict.problem}" if verdict.problem else text


def lane(folder: Path, cells: Sequence[Cell], engines: int, staged: bool) -> list[Verdict]:
    """One world after the other: a cell that fails takes its world along, the next one begins anew."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing stays when the tool is stopped
    die_with_parent(signal.SIGTERM)
    verdicts: list[Verdict] = []
    left = list(cells)
    while left:
        where, well = folder / f"from-{len(verdicts):03d}", True
        with World(where, engines=engines, staged=staged) as world:
            while left and well:
                verdicts.append(strike(world, left.pop(0)))
                print(row(verdicts[-1]), flush=True)
                well = not verdicts[-1].problem
        if well:
            shutil.rmtree(where)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="parts of cells' names, separated by commas; default all")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--own", action="store_true", help="the run's own sidecar and engine, instead of two of each elsewhere"
    )
    parser.add_argument("--staged", action="store_true", help="engines that switch between two tokens")
    parser.add_argument("--lanes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="order of the cells")
    parser.add_argument("--folder", type=Path, help="new; is kept. Default: a temporary one, kept if a cell fails")
    arguments = parser.parse_args()
    if arguments.own and arguments.staged:
        parser.error("--own and --staged exclude each other: a switch can't be seen from outside")
    words = [word for word in arguments.cells.split(",") if word]
    cells = chosen(words, staged=arguments.staged) * arguments.repeat
    if not cells:
        example = chosen([], staged=arguments.staged)[0]
        parser.error(f"no cell matches {arguments.cells!r}; a cell is process/phase/signal: {example}")
    random.Random(arguments.seed).shuffle(cells)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    started = time.monotonic()
    print(f"{len(cells)} cells, {arguments.lanes} lanes, order of seed {arguments.seed}, in {folder}")
    print(line(HEADINGS), flush=True)
    lanes = [cells[index :: arguments.lanes] for index in range(arguments.lanes)]
    with ProcessPoolExecutor(arguments.lanes, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(lane, folder / f"lane-{i}", part, 0 if arguments.own else 2, arguments.staged)
            for i, part in enumerate(lanes)
            if part
        ]
        verdicts = [verdict for job in jobs for verdict in job.result()]
    failed = [str(verdict.cell) for verdict in verdicts if verdict.problem]
    print(f"{len(verdicts) - len(failed)} of {len(cells)} cells passed in {time.monotonic() - started:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}; see {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
