"""Read addresses, resolve names to those of this host, and listen only there.

Launchers use it, so it loads no torch.
"""

import errno
import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

from evener.errors import ConfigError, LaunchError

LOOPBACK: Final = "127.0.0.1"
_NAME = re.compile(r"[\w.-]+")  # names may have letters of any language
LARGEST_PORT: Final = 65_535
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def is_loopback(host: str) -> bool:
    """Return whether a name or number stands for the host itself, whichever host uses it.

    That holds for loopback numbers and for ``localhost``, also where that is ``::1`` alone. Another
    name that leads to a loopback number here (many distributions map a host's own name to
    127.0.1.1) leads elsewhere on other hosts, so it does not count.
    """
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_unknown_name(error: OSError | UnicodeError) -> bool:
    """Return whether an attempt to connect failed for a name that no retry makes known."""
    # Python encodes names before it asks for them, and refuses labels of more than 63 letters.
    is_name = isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    return is_name or isinstance(error, UnicodeError)


def numbers_of(host: str) -> list[str]:
    """Return the numbers that a host has here, IPv4 first; of a number, itself.

    Hosts that share IPv4 alone are common, hosts that share IPv6 alone are rare. Where a name has
    both, all ranks must choose alike, so the order is fixed.

    Raises:
        OSError, UnicodeError: The name is unknown here.
    """
    if is_number(host):
        return [host]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def bind(host: str, port: int, backlog: int = 0) -> socket.socket:
    """Return a TCP socket that is bound to the address of a host.

    The socket is bound to all addresses in two cases: the host is not an address of this machine (a
    forwarded address, a Kubernetes service), or its name leads to loopback here only: others could
    not connect otherwise.

    Args:
        host: Name or number under which others will look for it.
        port: 0 takes one that is free.
        backlog: How many connections may wait there; with 0 it does not listen yet.

    Raises:
        OSError: The port is in use, or not allowed.
    """
    try:
        numbers = numbers_of(host)
    except (OSError, UnicodeError):  # the connecting side reports it
        numbers = []
    for number in numbers:
        if is_loopback(number) and not is_loopback(host):
            continue
        try:
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            return _bound(family, number, port, backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return _bound(family, "", port, backlog)


def is_own(host: str) -> bool:
    """Return whether a name or number leads to this machine: one can listen there."""
    try:
        for number in numbers_of(host):
            with suppress(OSError):
                _bound(socket.AF_INET6 if ":" in number else socket.AF_INET, number, 0, 0).close()
                return True
    except (OSError, UnicodeError):  # unknown here
        pass
    return False


def open_port(host: str, port: int, *, program: str, is_guarded: bool) -> socket.socket:
    """Return a TCP socket that listens on a host: only on loopback unless clients need a token.

    Args:
        host: Name or number; see ``bind``.
        port: 0 takes one that is free.
        program: What listens, for messages.
        is_guarded: Whether clients must know a token.

    Raises:
        ConfigError: The program would listen on other than loopback without a token.
        LaunchError: The port is in use, or not allowed; its cause is the OSError.
    """
    exposed = ConfigError(
        f"{program} on {host} would answer every machine that reaches it; give --token-file FILE, "
        f"or listen on {LOOPBACK}"
    )
    if not is_guarded and not is_loopback(host):
        raise exposed
    try:
        listening = bind(host, port, socket.SOMAXCONN)
    except OSError as error:
        raise LaunchError(
            f"{program} cannot listen on {host} port {port} ({error.strerror}): end the program "
            "that uses it, or give another port"
        ) from error
    if not is_guarded and listens_everywhere(listening):  # the name of loopback is unknown here
        listening.close()
        raise exposed
    return listening


def end_when_unreachable(connection: socket.socket, silence_s: float) -> None:
    """Have the kernel end a TCP connection whose other machine has not answered for that long.

    A stopped or busy process keeps it: the kernel of its machine answers.

    Args:
        connection: The connection.
        silence_s: From 4 seconds on.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter_s = min(8000, max(1, int(silence_s / 4)))  # the kernel takes up to 32,767 s
    # Probes after the first half, and an end to data that is not acknowledged. In milliseconds.
    for name, value in (
        ("TCP_KEEPIDLE", 2 * quarter_s),
        ("TCP_KEEPINTVL", quarter_s),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 4000 * quarter_s),
    ):
        option = getattr(socket, name, None)
        if option is not None:  # macOS and Windows lack some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listens_everywhere(bound: socket.socket) -> bool:
    """Return whether a socket is bound to every address of this machine."""
    return ip_address(str(bound.getsockname()[0])).is_unspecified


def is_number(host: str) -> bool:
    """Return whether a host is an IP address, and not a name."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _bound(family: socket.AddressFamily, number: str, port: int, backlog: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Lets a run begin on the port of one that has just ended.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not number:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Resolved again because of a scope, as in fe80::1%eth0.
        info = socket.getaddrinfo(
            number or None, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound.bind(info[0][4])
        if backlog:
            bound.listen(backlog)
    except BaseException:
        bound.close()
        raise
    return bound


# ── as people write them ──────────────────────────────────────────────────────────────────────────


def parse_address(address: object, name: str, *, may_bind: bool = False) -> tuple[str, int | None]:
    """Take an address apart; ask no network.

    Args:
        address: ``HOST``, ``HOST:PORT``, ``[IPv6]``, ``[IPv6]:PORT`` or an IPv6 address alone.
        name: What it is called, for errors.
        may_bind: Whether it may stand for every address of this host, as ``0.0.0.0`` does: one can
            listen there, but no one else can connect to it.

    Returns:
        The host, without brackets, and the port where there is one.

    Raises:
        ConfigError: It is not text, not a host, stands for every address, or has an invalid port.
    """
    if not isinstance(address, str):
        raise ConfigError(f"{name} is {address!r}; give a name or an IP address as text")
    host, port = _split(address.strip())
    if not (is_number(host) if ":" in host else _NAME.fullmatch(host)):
        raise ConfigError(
            f"{name} is {address!r}, which is not a host; give a name or an IP address, with :PORT "
            "behind it or without (an IPv6 address then stands in brackets)"
        )
    if _is_wildcard(host) and not may_bind:
        raise ConfigError(
            f"{name} is {address!r}, which stands for every address: that host alone can use it, "
            "to listen; give the name or IP address under which other machines reach it"
        )
    if port is None:
        return host, None
    if not (port.isdecimal() and 1 <= int(port) <= LARGEST_PORT):
        raise ConfigError(f"{name} is {address!r}; give a port from 1 to {LARGEST_PORT} after ':'")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> tuple[str, str | None]:
    if "/" in text:  # the address of a page
        return "", None
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        if rest and not rest.startswith(":"):
            return "", None
        return (host, rest[1:] if rest else None) if "]" in text else ("", None)
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def _is_wildcard(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_unspecified
    with suppress(OSError):
        return not any(socket.inet_aton(host))  # shorter ways to write it, such as 0
    return False
