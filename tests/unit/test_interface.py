"""The control plane's interface is there and private: runtime/interface.py."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hybridasync.config.models import NetworkSection
from hybridasync.errors import ConfigError
from hybridasync.runtime.interface import check_interface


def addresses(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    entries = [
        SimpleNamespace(family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address)
        for address in found
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": entries})


@pytest.mark.parametrize(
    "private",
    [
        *("127.0.0.1", "10.77.0.1", "192.168.1.2", "172.16.0.1", "100.64.0.1", "169.254.0.1", "::1", "fd00::1"),
        "fe80::1%lo",
    ],
)
def test_private_addresses_pass(monkeypatch: pytest.MonkeyPatch, private: str) -> None:
    """Loopback, private, shared and link-local addresses are no way in from outside."""
    addresses(monkeypatch, private)
    check_interface(NetworkSection())


@pytest.mark.parametrize("public", ["8.8.8.8", "2606:4700::1111"])
def test_public_address_is_refused_until_it_is_allowed(monkeypatch: pytest.MonkeyPatch, public: str) -> None:
    """An RPC port in the internet is a shell for anybody: refused with the address, unless the user insists."""
    addresses(monkeypatch, public)
    with pytest.raises(ConfigError, match=f"network.interface: lo has the public address {public}.*no authentication"):
        check_interface(NetworkSection())
    check_interface(NetworkSection(allow_public_address=True))


def test_only_the_address_that_is_bound_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are bound to the IPv4 address where there is one; a global IPv6 address beside it isn't used."""
    addresses(monkeypatch, "10.0.0.1", "2606:4700::1111")
    check_interface(NetworkSection())


def test_missing_interface_and_address_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name lists what there is; an interface that is down has no address."""
    with pytest.raises(ConfigError, match=r"no network interface 'nosuch0'; it has .*lo"):
        check_interface(NetworkSection(interface="nosuch0"))
    addresses(monkeypatch)
    with pytest.raises(ConfigError, match="lo has no address"):
        check_interface(NetworkSection())
