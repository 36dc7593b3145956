"""Whether the control plane's network interface is there, and private."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from hybridasync.config.models import NetworkSection
from hybridasync.errors import ConfigError


def check_interface(network: NetworkSection) -> None:
    """RPC has no authentication: whoever reaches its port has a shell as this user. So it isn't opened to the world.

    Raises ConfigError: no such interface, one without an address, or one whose address is public.
    """
    here = [name for _, name in socket.if_nameindex()]
    if network.interface not in here:
        raise ConfigError(
            f"this machine has no network interface {network.interface!r}; it has {', '.join(here)}",
            setting="network.interface",
        )
    addresses = _addresses(network.interface)
    if not addresses:
        raise ConfigError(f"{network.interface} has no address", setting="network.interface")
    public = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if public and not network.allow_public_address:
        raise ConfigError(
            f"{network.interface} has the public address {', '.join(public)}; RPC has no authentication, and whoever "
            "reaches its port can run programs as this user. Name a private interface, or, behind a firewall that lets "
            "only the job's nodes in, set network.allow_public_address = true",
            setting="network.interface",
        )


def address_of(network: NetworkSection) -> str:
    """At which other processes of the job reach this one. `check_interface` comes first."""
    return _addresses(network.interface)[0]


def _addresses(interface: str) -> list[str]:
    """What sockets are bound to: torch takes an IPv4 address where the interface has one."""
    found = psutil.net_if_addrs().get(interface, [])
    of_family = {
        family: [entry.address.partition("%")[0] for entry in found if entry.family == family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return of_family[socket.AF_INET] or of_family[socket.AF_INET6]
