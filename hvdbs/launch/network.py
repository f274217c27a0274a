"""Network interfaces of this machine, by the kernel's own words. IPv4, as Horovod's rendezvous is."""

from __future__ import annotations

import fcntl
import socket
import struct

from hvdbs.errors import refusal, suggestion

_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(interface: str) -> str:
    """The address of ``interface``. Raises HvdbsError, with what there is, if it has none."""
    there = interfaces()
    if interface not in there:
        raise refusal(
            "--nic",
            interface,
            f"is no interface with an address on {socket.gethostname()}",
            suggestion(interface, there),
        )
    return there[interface]


def source_towards(address: str) -> str:
    """The address that this machine would send from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise refusal(
                "host", address, f"cannot be reached from {socket.gethostname()} ({error.strerror})"
            ) from None
        source: str = probe.getsockname()[0]
        return source


def interface_towards(address: str) -> str:
    """The interface that holds the address this machine would send from. Raises HvdbsError if none does."""
    source = source_towards(address)
    names = [name for name, own in interfaces().items() if own == source]
    if not names:
        raise refusal("--nic", "none", f"was found on {socket.gethostname()} towards {address}", "name it")
    return names[0]
