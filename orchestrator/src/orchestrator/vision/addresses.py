"""Which addresses a URL of a request may lead to: public ones, so that nobody reaches into the server's own network.

The fetcher asks about every address that a host name resolves to, connects to no other one, and asks again for every
redirect. So a name that resolves to something else the second time gains nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NOT_PUBLIC = [
    ipaddress.ip_network(name)
    for name in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's translation; clouds keep services there
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's host services, under an address that looks public
        "169.254.0.0/16",  # link-local: metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # relays from IPv6
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
        "2001::/23",  # protocols, among them tunnels that carry an IPv4 address
        "2001:db8::/32",
        "2002::/16",  # a tunnel that carries an IPv4 address
        "3fff::/20",
    )
]
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out. Loopback, mapped and translated IPv4, private and link-local are outside."""


def is_public(address: str) -> bool:
    """Whether an address is one that anybody on the Internet could reach; False for what is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and (found.scope_id is not None or found not in _GLOBAL_V6):
        return False
    return not _within(found, _NOT_PUBLIC)


def destination_filter(allowed: Sequence[str] = (), refused: Sequence[str] = ()) -> Callable[[str, str], bool]:
    """The fetcher's question: may it connect to `address`, of `host`? `allowed` and `refused` are networks.

    `refused` goes before `allowed`, and `allowed` before the rule for public addresses. Raises ValueError for what is
    no network.
    """
    more, less = ([ipaddress.ip_network(name) for name in names] for names in (allowed, refused))

    def may_connect(host: str, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return not _within(found, less) and (_within(found, more) or is_public(address))

    return may_connect


def _within(address: ipaddress.IPv4Address | ipaddress.IPv6Address, networks: Sequence[_Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)
