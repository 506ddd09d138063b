"""Exchanges outside of windows, which survive the loss of a rank."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener.engine.engine import Engine, EngineOptions
from evener.engine.team import Team
from evener.engine.training_state import TrainingState
from evener.errors import CollectiveError
from evener.places import here
from evener.planning.policies import ApplyPolicy
from evener.protocol.row import Purpose

_ALONE = (
    "{} at {} is done by rank {} alone: it joins a team that has passed this point. Its loop, "
    "`for epoch in ddp.epochs(n)`, begins at the epoch of the team"
)


class Heard(NamedTuple):
    """The newest exchange outside of windows.

    If a rank is lost in one, some of the others may have its result and others not. These adopt the
    result.

    Attributes:
        number: How many there have been so far.
        answer: Its result, in JSON.
        rows: Its result, where that is a tensor.
    """

    number: int = 0
    answer: Any = None
    rows: Tensor | None = None


class AskingEngine(Engine):
    """An engine whose ranks exchange something outside of windows, such as in an evaluation.

    After the set-up of a team, all exchanges go through this class, except those of a window or of
    a change of the team. Each exchange has a number. If a rank is lost in it, the remaining ranks
    repeat it, unless one of them has its result: then all adopt that. An exchange needs all ranks,
    so no rank is ahead of another by more than one exchange. A call that exchanges nothing has no
    number.

    A rank exchanges nothing at a point of the script that the others passed before it joined.

    Attributes:
        summed_ranks: Ranks whose numbers are in the newest sums of ``sum_up``.
    """

    def __init__(
        self, team: Team, training: TrainingState, options: EngineOptions, way: ApplyPolicy
    ) -> None:
        super().__init__(team, training, options, way)
        self._heard = Heard()
        self.summed_ranks: frozenset[int] = frozenset()
        #: Whether this rank is in an exchange outside of windows.
        self._is_asking = False

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Return whether the others passed this point of the script before this rank joined."""

    @abstractmethod
    def _survive(self, error: CollectiveError) -> bool:
        """Continue with the remaining ranks after a loss; all of them call it together."""

    def _hear(self, exchange: Callable[[], Heard]) -> Heard:
        """Exchange outside of windows and return the result; all present ranks call it together.

        Args:
            exchange: Does it once and returns the result. If a rank is lost in it, and no remaining
                rank has heard its end, it is called again.
        """
        number = self._heard.number + 1
        while self._heard.number < number:
            before, self._is_asking = self._is_asking, True
            try:
                self._heard = exchange()._replace(number=number)
            except CollectiveError as error:
                self._survive(error)
            finally:
                self._is_asking = before
        return self._heard

    def ask(self, purpose: Purpose, numbers: Sequence[float] = ()) -> dict[int, Sequence[float]]:
        """Exchange numbers between the ranks that are present; all of them call it together.

        First commits what a loop that was left by ``break`` has applied. Takes note of ranks that
        want to stop.

        Args:
            purpose: What this rank wants; must be the same on all ranks.
            numbers: At most ``room_of(world_size)``.

        Returns:
            Each rank's numbers, by rank and in rank order. Where a rank is lost meanwhile, those of
            the ranks that remain, or those of all.

        Raises:
            CollectiveMismatchError: Ranks came for different things.
        """
        own = tuple(map(float, numbers))
        if self.is_alone:
            self.habits.tell_once(_ALONE.format(purpose.deed, here(), self.rank))
            return {self.rank: own}

        def meet() -> Heard:
            if self.has_left:
                self.settle()
            rows = self._meet(purpose, body=own).rows
            return Heard(answer=[[rank, row.body] for rank, row in rows.items()])

        return {int(rank): body for rank, body in self._hear(meet).answer}

    def sum_up(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sum of each number over ranks, from the left in rank order."""
        totals, rows = [0.0] * len(numbers), self.ask(Purpose.VALUE, numbers)
        self.summed_ranks = frozenset(rows)
        for row in rows.values():
            totals = [total + number for total, number in zip(totals, row, strict=True)]
        return totals

    def introduce(self, told: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Give every rank that is present each one's JSON, in rank order; all call it together."""
        if self.is_alone:
            return [told]
        heard = self._hear(lambda: Heard(answer=self.team.introduce(told, timeout_s=timeout_s)))
        return [*heard.answer]

    def hear_main(self, told: Any, *, timeout_s: float | None = None) -> Any:
        """Return the JSON ``told`` of the main rank; all that are present call it together.

        Where that is lost meanwhile, what the next main rank has told.
        """
        if self.is_alone:
            return told

        def hear() -> Heard:
            # If the team continues without this rank, it is alone.
            main = self.state.planner if self.state.planner >= 0 else self.rank
            return Heard(answer=self.team.hear(main, told, timeout_s=timeout_s))

        return self._hear(hear).answer

    def ask_main(self, do: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        """Let the main rank do something; all ranks that are present call it together.

        Where that is lost meanwhile, the next main rank does it.

        Args:
            do: Does it, and returns a result in JSON other than ``None``.
            timeout_s: So long the others wait.

        Returns:
            The result; ``None`` where the team has continued without this rank.
        """
        result = None
        while result is None and not self.is_alone:
            result = self.hear_main(do() if self.is_main else None, timeout_s=timeout_s)
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
        if self.is_alone:
            return (self.rank,), torch.empty((0, *row), dtype=dtype) if own is None else own
        if not any(counts[rank] for rank in self.team.members):  # nothing is exchanged
            return self.team.members, torch.empty((0, *row), dtype=dtype, device=device)

        def gather() -> Heard:
            ranks = self.team.members
            size = (len(ranks), max(counts[rank] for rank in ranks), *row)
            parts = torch.empty(size, dtype=dtype, device=device)
            if own is not None:
                parts[ranks.index(self.rank), : len(own)] = own
            self.comm.all_gather_parts(parts, what="rows of all ranks (ddp.gather)")
            each = [part[: counts[rank]] for rank, part in zip(ranks, parts, strict=True)]
            return Heard(answer=[*ranks], rows=torch.cat(each))

        _, answer, rows = self._hear(gather)
        ranks = tuple(answer)
        assert rows is not None
        if self.team.is_elastic:
            return ranks, rows.clone()  # the script may write to the result
        self._heard = self._heard._replace(rows=None)  # no rank will ask for them
        return ranks, rows

    def verify(self) -> None:
        """Compare the state of all ranks, if ``verify_every`` is given.

        All ranks call it together: at a commit, or between epochs.

        Raises:
            ReplicasDifferError: On every rank.
        """

        def compare() -> Heard:
            self._verify()
            return Heard()

        if self._check.every and not self.is_alone:
            self._hear(compare)

    def _take_heard(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Adopt the result of the newest exchange outside of windows."""
        numbers = [-1 if one["is_new"] else int(one["heard"][0]) for one in told]
        if (latest := max(numbers)) < 0:  # no rank holds state: all start over
            self._heard = Heard()
            return
        source = numbers.index(latest)
        rows, packed = None, told[source]["rows"]
        if packed is not None and min(n for n in numbers if n >= 0) < latest:
            shape, dtype = packed
            number = getattr(torch, dtype.removeprefix("torch."))
            known = self._heard.rows if self.comm.rank == source else None
            rows = torch.empty(shape, dtype=number) if known is None else known.cpu().contiguous()
            self.comm.broadcast(rows, source, what="rows that some ranks have missed")
        if numbers[self.comm.rank] < latest:
            self._heard = Heard(latest, told[source]["heard"][1], rows)
