"""No test reaches beyond this machine: other sockets and look-ups of names are refused.

An audit hook refuses them in this process and its forks. Other programs that tests start find a
proxy at a port where nothing listens, so that whatever they download fails at once. The one program
that installs packages gets the environment `ONLINE`.
"""

import ipaddress
import os
import socket
import sys

PROXY = "127.0.0.1", 9
PROXY_URL = f"http://{PROXY[0]}:{PROXY[1]}"
ONLINE = {name: value for name, value in os.environ.items() if value != PROXY_URL}
LOCAL = "localhost", "127.0.0.1", "::1"
NUMBERS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
NAMES = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


class Refused(OSError):
    """The error for a socket or a look-up that leaves this machine."""


def refuse_network() -> None:
    """Refuse every socket and look-up beyond this machine, from now on."""
    sys.addaudithook(_check)
    for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy"):
        os.environ[name] = os.environ[name.upper()] = PROXY_URL
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(LOCAL)


def _check(event: str, arguments: tuple) -> None:
    if event in NUMBERS and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
        address = arguments[1]  # None where the socket is connected already
        if address and (address[:2] == PROXY or not _is_local(address[0])):
            raise Refused(f"tests have no network, and asked for {address[0]} at {address[1]}")
    elif event in NAMES and not _is_local(arguments[0]):
        raise Refused(f"tests have no network, and looked up {arguments[0]!r}")


def _is_local(host: str | bytes | None) -> bool:
    """Return whether a name or an address, of which None is any of this machine, is local."""
    host = host.decode() if isinstance(host, bytes) else host
    if host is None or host in LOCAL or host == "":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
