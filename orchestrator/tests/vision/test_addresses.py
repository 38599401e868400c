"""Which addresses URLs may lead to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.vision import ImageLimits
from orchestrator.vision.addresses import destination_filter, is_public

PUBLIC = ["1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"]
PUBLIC += ["128.0.0.0", "168.63.129.15", "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.167.255.255"]
PUBLIC += ["223.255.255.255", "2606:4700::1111", "2a00:1450:4001::200e", "2001:4860:4860::8888"]

PRIVATE = ["0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.100.100.200", "127.0.0.1"]
PRIVATE += ["127.255.255.254", "169.254.0.1", "169.254.169.254", "168.63.129.16", "172.16.0.1", "172.31.255.255"]
PRIVATE += ["192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.7", "203.0.113.9"]
PRIVATE += ["224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"]
PRIVATE += ["::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1"]
PRIVATE += ["100::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "2001::1"]
PRIVATE += ["2001:db8::1", "2002:7f00:1::1", "3fff::1", "4000::1", "2606:4700::1111%1"]
NONE = [
    "",
    "localhost",
    "127.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "1.2.3.4.5",
    "[::1]",
    " 8.8.8.8",
    "8.8.8.8/32",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address):
    assert is_public(address) and destination_filter()("example.org", address)


@pytest.mark.parametrize("address", [*PRIVATE, *NONE])
def test_everything_else(address):
    assert not is_public(address) and not destination_filter()("example.org", address)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_nothing_that_the_library_knows_as_special_is_public(address):
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    if special or address.is_reserved or address.is_unspecified:
        assert not is_public(str(address))


def test_networks_of_the_operator():
    """Both lists, and the refused ones first."""
    may = destination_filter(["10.1.0.0/16", "fd12::/16"], ["10.1.2.0/24", "8.8.8.0/24"])
    assert may("store", "10.1.1.1") and may("store", "fd12::5") and may("x", "9.9.9.9")
    assert not any(may("store", address) for address in ("10.1.2.3", "10.2.0.1", "8.8.8.8", "127.0.0.1", "store"))
    for bad in ("10.1.0.1/16", "store", "10.0.0.0/33"):
        with pytest.raises(ValueError, match=bad):
            ImageLimits(networks=(bad,))
        with pytest.raises(ValueError, match=bad):
            destination_filter(refused=[bad])
