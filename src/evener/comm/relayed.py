"""A store of ``torch.distributed`` whose keys another process keeps, for forming process groups."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import final

from evener.comm.c10d import Store


class KeyValues(ABC):
    """Keys and their values, kept elsewhere; every call waits for an answer."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Set a key."""

    @abstractmethod
    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait until a key is set, and return its value; raise RuntimeError after ``timeout_s``."""

    @abstractmethod
    def increase(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 where it is not set, and return the sum."""

    @abstractmethod
    def holds(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set, without waiting for them."""

    @abstractmethod
    def remove(self, key: str) -> bool:
        """Remove a key and return whether it was set."""


@final
class RelayedStore(Store):
    """The same as torch and Gloo want to see it.

    torch calls it from C++ by way of the Python object: keep a reference to it for as long as a
    ``PrefixStore`` or a process group uses it.
    """

    def __init__(self, values: KeyValues, timeout_s: float) -> None:
        """Use keys and values; ``timeout_s`` is for waits that state no time themselves."""
        super().__init__()
        self._values = values
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._values.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""
        return self._values.fetch(key, self._timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key and return the sum."""
        return self._values.increase(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._values.holds(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self._values.fetch(key, (timeout or self._timeout).total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was set."""
        return self._values.remove(key)

    deleteKey = delete_key  # noqa: N815  # the name that C++ looks for

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time for waits that state none themselves."""
        self._timeout = timeout
