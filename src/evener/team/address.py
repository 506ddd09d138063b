"""Addresses as people write them: a host, and perhaps a port behind it."""

import re
import socket
from contextlib import suppress
from ipaddress import ip_address

from evener.comm.addresses import is_number
from evener.errors import ConfigError

_NAME = re.compile(r"[\w.-]+")  # names may have letters of any language
_LARGEST_PORT = 65_535


def parse_address(address: object, name: str, *, may_bind: bool = False) -> tuple[str, int | None]:
    """Take an address apart; ask no network.

    Args:
        address: ``HOST``, ``HOST:PORT``, ``[IPv6]``, ``[IPv6]:PORT`` or an IPv6 address alone.
        name: What it is called, for errors.
        may_bind: Whether it may stand for every address of this host, as ``0.0.0.0`` does: one can
            listen there, but nobody else can connect to it.

    Returns:
        The host, without brackets, and the port where there is one.

    Raises:
        ConfigError: It is no text, no host, stands for every address, or the port is none.
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
    if not (port.isdecimal() and 1 <= int(port) <= _LARGEST_PORT):
        raise ConfigError(f"{name} is {address!r}; give a port from 1 to {_LARGEST_PORT} after ':'")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(port: int, name: str, least: int = 1) -> int:
    """Return a port, if it can be one; ``name`` is for the ConfigError otherwise."""
    if not least <= port <= _LARGEST_PORT:
        raise ConfigError(f"{name} is {port}; give a port from 1 to {_LARGEST_PORT}")
    return port


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
