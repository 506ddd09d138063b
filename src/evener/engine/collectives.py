"""Exchanges outside of windows, such as in an evaluation, which survive the loss of a rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.engine.generations import Generations
from evener.engine.rounds import CollectiveResult
from evener.errors import CollectiveMismatchError
from evener.places import here
from evener.protocol import wording
from evener.protocol.row import Purpose

_ALONE = (
    "{} at {} is done by rank {} alone: it joins a team that has passed this point. Its loop, "
    "`for epoch in ddp.epochs(n)`, begins at the epoch of the team"
)


class Collectives:
    """The exchanges of a rank outside of windows.

    After the set-up of a team, all exchanges use this class, except those of a window or of a
    change of the team. Each has a number. If a rank is lost in it, the remaining ranks repeat it,
    unless one of them has its result: then all take that. An exchange needs all ranks, so no rank
    is ahead of another by more than one exchange.

    A rank exchanges nothing at a point of the script that the others passed before it joined.

    Args:
        generations: Begin another generation if a rank is lost.
    """

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._rounds = generations.rounds

    def ask(
        self, what: str, value: Any = None, *, timeout_s: float | None = None
    ) -> dict[int, Any]:
        """Give every rank that is present each one's value; all of them call it together.

        First commits what a loop that was left by ``break`` has applied. Takes note of ranks that
        want to stop.

        Args:
            what: What this rank does, in words; must be the same on all ranks.
            value: In JSON.
            timeout_s: Deadline; ``None`` for the communicator's.

        Returns:
            Each rank's value, by rank and in rank order. If a rank is lost meanwhile, those of
            the ranks that remain, or those of all.

        Raises:
            CollectiveMismatchError: Ranks came for different things.
        """
        rounds = self._rounds
        if self._generations.is_alone:
            self._warn_alone(what)
            return {rounds.rank: value}

        def exchange() -> CollectiveResult:
            windows = self._generations.windows
            if rounds.has_left:
                windows.settle()
            found = windows.meet(Purpose.ASK, what=what, timeout_s=timeout_s)
            own, members = [what, here(), value], rounds.team.members
            gathered = rounds.comm.all_gather_json(own, what="answers", timeout_s=timeout_s)
            if len({theirs for theirs, *_ in gathered}) > 1:
                doing = {
                    rank: f"{w} at {p}" for rank, (w, p, _) in zip(members, gathered, strict=True)
                }
                rounds.state = rounds.state.end()
                raise CollectiveMismatchError(wording.mismatch(found.rows, doing))
            answers = {rank: answer for rank, (*_, answer) in zip(members, gathered, strict=True)}
            return CollectiveResult(answers=answers)

        return self._repeat(exchange).answers

    def take_from_main(self, what: str, value: Any, *, timeout_s: float | None = None) -> Any:
        """Return the value of the main rank; all that are present call it together.

        If that rank is lost meanwhile, the value of the next main rank.
        """
        answers = self.ask(what, value, timeout_s=timeout_s)
        return answers.get(self._rounds.state.planner, value)

    def ask_main(self, what: str, do: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        """Let the main rank do something; all ranks that are present call it together.

        If that rank is lost meanwhile, the next main rank does it.

        Args:
            what: What it does, in words.
            do: Does it, and returns a result in JSON other than ``None``.
            timeout_s: How long the others wait.

        Returns:
            The result; ``None`` if the team has continued without this rank.
        """
        result, rounds = None, self._rounds
        while result is None and not self._generations.is_alone:
            own = do() if rounds.is_main else None
            result = self.take_from_main(what, own, timeout_s=timeout_s)
        return result

    def gather_rows(
        self,
        own: Tensor | None,
        counts: Mapping[int, int],
        row: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[tuple[int, ...], Tensor]:
        """Return the rows of all ranks in rank order; all that are present call it together.

        Args:
            own: This rank's rows; ``None`` for none.
            counts: Rows that each rank has, by rank; also of one that is lost meanwhile.
            row: Shape of a row, the same on all ranks.
            dtype: Of the rows.
            device: Where they are exchanged.

        Returns:
            The ranks whose rows they are, and the rows.
        """
        rounds, team = self._rounds, self._rounds.team
        if self._generations.is_alone:
            return (team.rank,), torch.empty((0, *row), dtype=dtype) if own is None else own
        if not any(counts[rank] for rank in team.members):  # nothing is exchanged
            return team.members, torch.empty((0, *row), dtype=dtype, device=device)

        def exchange() -> CollectiveResult:
            ranks = team.members
            size = (len(ranks), max(counts[rank] for rank in ranks), *row)
            parts = torch.empty(size, dtype=dtype, device=device)
            if own is not None:
                parts[ranks.index(team.rank), : len(own)] = own
            team.comm.all_gather_parts(parts, what="rows of all ranks (ddp.gather)")
            each = [part[: counts[rank]] for rank, part in zip(ranks, parts, strict=True)]
            return CollectiveResult(answers=dict.fromkeys(ranks), rows=torch.cat(each))

        _, answers, rows = self._repeat(exchange)
        assert rows is not None
        if team.is_elastic:
            return tuple(answers), rows.clone()  # the script may write to the result
        rounds.latest = rounds.latest._replace(rows=None)  # no rank will ask for them
        return tuple(answers), rows

    def _repeat(self, exchange: Callable[[], CollectiveResult]) -> CollectiveResult:
        """Exchange until this rank has the result; all present ranks call it together."""
        rounds = self._rounds
        number = rounds.latest.number + 1

        def once() -> None:
            rounds.latest = exchange()._replace(number=number)

        before, rounds.is_asking = rounds.is_asking, True
        try:
            while rounds.latest.number < number:
                self._generations.keep(once)
        finally:
            rounds.is_asking = before
        return rounds.latest

    def _warn_alone(self, what: str) -> None:
        text = _ALONE.format(what, here(), self._rounds.rank)
        self._generations.windows.options.guards.warn_once(text)
