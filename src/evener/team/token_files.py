"""Secrets in files, by which machines of one user know one another."""

import os
import sys
from pathlib import Path
from stat import S_IMODE
from typing import Final

from evener.errors import ConfigError
from evener.files import open_for_reading

_SHORTEST_TOKEN: Final = 16
_LONGEST_TOKEN: Final = 4096


def read_token(path: Path | None) -> bytes:
    """Return the token of a file, without white space around it; empty without a file.

    Raises:
        ConfigError: It cannot be read, others can read or change it, or it is too short or long.
    """
    if path is None:
        return b""
    try:
        with open_for_reading(path) as stream:
            status = os.fstat(stream.fileno())
            token = stream.read(_LONGEST_TOKEN + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read ({error.strerror}); name a file with the token"
        ) from None
    if sys.platform != "win32":
        _require_private(path, status)
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN:
        raise ConfigError(
            f"the token in {path} has {len(token)} bytes; give {_SHORTEST_TOKEN} to "
            f"{_LONGEST_TOKEN} random ones, such as by "
            f"`(umask 077; openssl rand -hex 32 > {path})`"
        )
    return token


def _require_private(path: Path, status: os.stat_result) -> None:
    mode = S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the token file {path} belongs to another user (uid {status.st_uid}), who can read "
            f"and change it; use a file of your own with mode 0600, or `chown {os.geteuid()} "
            f"{path}`"
        )
    if mode & 0o077:
        raise ConfigError(
            f"the token file {path} is open to other users (mode {mode:04o}); run `chmod 600 "
            f"{path}`, and make another token if others may have read it"
        )
