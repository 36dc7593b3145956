"""The reference of settings is made from the models."""

from __future__ import annotations

from hybridasync.config.names import settings
from hybridasync.config.reference import document, render


def test_the_reference_is_up_to_date() -> None:
    """docs/configuration.md is what the models say: run `python -m hybridasync.config.reference` after a change."""
    assert document().read_text(encoding="utf-8") == render()


def test_every_setting_has_a_meaning() -> None:
    """No setting is without a description or without its line."""
    text = render()
    assert all(field.description for field in settings().values())
    assert all(f"| `{setting.rpartition('.')[2]}` |" in text for setting in settings())
