"""What tests count (states visited, points tried, seeds until wrong code is found) is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

FIGURE = "figure"

# An example that a busy machine held up for its usual 200 ms would be a failure, and pass the second time: "flaky".
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a figure; it is printed with the summary, also by a run of several processes."""
    return lambda text: request.node.user_properties.append((FIGURE, text))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    figures = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == FIGURE]
    if figures:
        terminalreporter.section("figures of the proof")
        for text in dict.fromkeys(figures):
            terminalreporter.write_line(text)
