"""Several data sets as one stream: each is drawn from in proportion to its weight, and wraps by itself."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hybridasync.data.source import Order, PromptDataset
from hybridasync.types import Prompt


@dataclass(frozen=True, slots=True)
class Mixture:
    """Data sets and their weights, which are positive and add up to anything."""

    datasets: tuple[PromptDataset, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        """Prompts of all data sets: as many draws count as an epoch, however the weights distribute them."""
        return sum(len(dataset) for dataset in self.datasets)

    @property
    def name(self) -> str:
        return "+".join(dataset.name for dataset in self.datasets)

    @property
    def loaded(self) -> int:
        return sum(dataset.loaded for dataset in self.datasets)

    @property
    def fingerprint(self) -> str:
        parts = [[dataset.name, dataset.fingerprint] for dataset in self.datasets]
        return hashlib.sha256(json.dumps([parts, self.weights]).encode()).hexdigest()

    @property
    def summary(self) -> str:
        total = sum(self.weights)
        shares = zip(self.datasets, self.weights, strict=True)
        return "; ".join(f"{dataset.summary}, {weight / total:.1%} of the draws" for dataset, weight in shares)

    def ordered(self, *, seed: int, shuffle: bool) -> MixedOrder:
        return MixedOrder([dataset.ordered(seed=seed, shuffle=shuffle) for dataset in self.datasets], self.weights)


class MixedOrder:
    """Draw n comes from the data set that is furthest behind its share, so that shares hold at every moment.

    Which prompt a draw is follows from n alone: the number of draws is the exact position in every data set.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float]) -> None:
        self._orders = orders
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(orders)
        self._places: list[tuple[int, int]] = []  # draw → data set and draw within it

    def at(self, uid: int) -> Prompt:
        self._extend(uid + 1)
        which, position = self._places[uid]
        return self._orders[which].at(position, uid=uid)

    def positions(self, draws: int) -> dict[str, dict[str, int]]:
        """Where the first `draws` leave each data set."""
        self._extend(draws)
        counts = Counter(which for which, _ in self._places[:draws])
        positions: dict[str, dict[str, int]] = {}
        for which, order in enumerate(self._orders):
            positions |= order.positions(counts[which])
        return positions

    def _extend(self, draws: int) -> None:
        while len(self._places) < draws:
            wanted = len(self._places) + 1
            behind = [share * wanted - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            which = behind.index(max(behind))
            self._places.append((which, self._drawn[which]))
            self._drawn[which] += 1
