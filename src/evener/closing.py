"""What is closed when a ``with`` block ends."""

from abc import ABC, abstractmethod
from typing import Any, Self


class Closing(ABC):
    """Something with a ``close`` that is also a context manager."""

    @abstractmethod
    def close(self) -> Any:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
