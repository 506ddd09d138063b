"""The coordinator's ledger: the facts of the team that a restarted coordinator needs."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from evener.closing import Closing
from evener.errors import ConfigError
from evener.files import flush, lock, open_regular, read_json, write_file
from evener.parsing import Fields
from evener.protocol.formation import Formation, read_message
from evener.team.terminal import warn

_FORMAT: Final = "evener ledger 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The state of a team that outlives its coordinator.

    Attributes:
        formation: The newest generation; ``None`` before the first.
        run_has_ended: Whether its run has ended.
        facts: Facts that are the same on all members, such as the model's fingerprint.
    """

    formation: Formation | None = None
    run_has_ended: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


@final
class Ledger(Closing):
    """A file that is replaced with each change, and is on disk before workers get the change.

    Only one coordinator has it at a time, by a kernel lock on ``<name>.lock``: a second one would
    form another generation while the team is running.

    Args:
        path: The file; created with the first entry.
        limits: Fewest and most members of the team.

    Attributes:
        entry: The newest entry.

    Raises:
        ConfigError: Another coordinator has it; or it cannot be read, or is another team's.
    """

    def __init__(self, path: Path, limits: tuple[int, int]) -> None:
        self._path, self._limits = path, limits
        self._lock = _lock(path)
        self.entry = LedgerEntry()
        try:
            if path.exists():
                self.entry = self._read()
        except BaseException:
            self.close()
            raise

    def write(self, entry: LedgerEntry) -> None:
        """Write an entry.

        A full disk does not end a team: the ledger is unchanged, a warning is printed, and the next
        change is written again.
        """
        self.entry = entry
        content = {"format": _FORMAT, "limits": self._limits, **asdict(entry)}
        try:
            write_file(self._path, json.dumps(content, indent=1).encode())
            flush(self._path.parent)
        except OSError as error:
            warn(
                f"the coordinator's ledger {self._path} cannot be written: {error}; a restarted "
                "coordinator would continue from an older generation until members report theirs; "
                "free disk space there"
            )

    def close(self) -> None:
        """Release the ledger for another coordinator; idempotent."""
        self._lock.close()

    def _read(self) -> LedgerEntry:
        remedy = (
            "start the coordinator with its former arguments; or, once every worker of the former "
            "team has ended, remove the file to begin a new team"
        )
        try:
            fields = Fields(read_json(self._path))
            if (found := fields.text("format")) != _FORMAT:
                raise ValueError(f"format is {found!r}, not {_FORMAT!r}")
            if (limits := tuple(fields.items("limits"))) != self._limits:
                theirs, ours = (":".join(map(str, each)) for each in (limits, self._limits))
                raise ValueError(f"it is of a team of {theirs} workers, this one has {ours}")
            formation = fields["formation"]
            return LedgerEntry(
                formation=formation and read_message(Formation, fields.fields("formation")),
                run_has_ended=fields.flag("run_has_ended"),
                facts=fields.fields("facts").values,
            )
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the coordinator's ledger {self._path} cannot be used: {error}; {remedy}"
            ) from None


def _lock(path: Path) -> Any:
    """Lock a ledger; return the file that holds the lock until it is closed.

    Raises:
        ConfigError: Another coordinator has it, or the file cannot be created.
    """
    beside = path.with_name(f"{path.name}.lock")
    try:
        stream = os.fdopen(open_regular(beside, os.O_WRONLY | os.O_CREAT), "wb")
    except OSError as error:
        raise ConfigError(
            f"the coordinator's ledger {path} cannot be used: {error}; give a file in a folder "
            "that exists and is writable (--ledger)"
        ) from None
    if not lock(stream.fileno()):
        stream.close()
        raise ConfigError(
            f"another coordinator has the ledger {path}, and its team may be running: end that "
            "one first, or give each team its own ledger (--ledger)"
        )
    return stream
