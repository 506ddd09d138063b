"""Secrets in files, by which machines of one user know one another."""

from pathlib import Path
from typing import Final

from evener.errors import ConfigError
from evener.files import read_file

_SHORTEST_TOKEN: Final = 16
_LONGEST_TOKEN: Final = 1 << 16


def read_token(path: Path | None) -> bytes:
    """Return the token of a file, without white space around it; empty without a file.

    Raises:
        ConfigError: It cannot be read, or is too short.
    """
    if path is None:
        return b""
    try:
        token = read_file(path, most_bytes=_LONGEST_TOKEN).strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from None
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"the token in {path} has {len(token)} bytes; give {_SHORTEST_TOKEN} or more, such as "
            f"by `openssl rand -hex 16 > {path}`"
        )
    return token
