"""Tests reach no other machine, neither in their own process nor in programs that they start."""

import socket
import subprocess
import sys
from contextlib import closing
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from offline import PROXY_URL, Refused

from capsule_zoo.data import MissingData, load_dataset

ELSEWHERE = "192.0.2.1"  # an address that documents alone use


def test_sockets_and_names_beyond_this_machine_are_refused():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with closing(socket.socket(type=kind)) as opened:
            with pytest.raises(Refused, match=f"tests have no network, and asked for {ELSEWHERE}"):
                opened.connect((ELSEWHERE, 80))
            with pytest.raises(Refused, match="no network"):
                opened.sendto(b"", (ELSEWHERE, 80))
    with closing(socket.socket(socket.AF_INET6)) as opened, pytest.raises(Refused):
        opened.connect(("2001:db8::1", 80))
    for look_up in (socket.gethostbyname, lambda name: socket.getaddrinfo(name, 80)):
        with pytest.raises(Refused, match="no network, and looked up"):
            look_up("example.org")


def test_local_sockets_are_open():
    assert socket.getaddrinfo("localhost", 80)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    first, second = socket.socketpair()
    with first, second:
        first.sendall(b"here")
        assert second.recv(4) == b"here"


def test_no_download_begins(tmp_path, monkeypatch):
    with pytest.raises(URLError, match="tests have no network"):
        urlopen("https://example.org")
    monkeypatch.delenv("CAPSULE_ZOO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("mnist", "binarized-mnist"):
        with pytest.raises(MissingData):
            load_dataset(name)


def test_programs_that_tests_start_have_no_network_either():
    code = f"from urllib.request import *; print(getproxies()); urlopen('http://{ELSEWHERE}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count(PROXY_URL) >= 3  # for HTTP, HTTPS and FTP
    assert done.returncode == 1 and "Connection refused" in done.stderr
