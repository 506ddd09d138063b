"""A worker's link to the coordinator of its team."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, final

from evener import lease_clock
from evener.comm.addresses import is_loopback
from evener.comm.c10d import Store
from evener.comm.messages import name_ranks
from evener.comm.network import own_address
from evener.errors import EvenerError, LaunchError, LeftOutError, RunEndedError, TeamRefusedError
from evener.parsing import Fields, whole
from evener.protocol.formation import (
    NO_NUMBER,
    WAITING,
    Deadlines,
    FixedPlace,
    Formation,
    Standing,
    read_message,
)
from evener.team.connection import CoordinatorConnection
from evener.team.wire import Message

_ANSWER_S: Final = 1.0


@final
class CoordinatorLink(CoordinatorConnection):
    """One connection to the coordinator, and a thread that keeps it; see ``CoordinatorConnection``.

    Any thread may call it.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        token: The team's token; ``None`` without one.
        member: Id of this worker, unique in the team.
        facts: What must be the same on all members, such as the model's fingerprint.
        timeout_s: Longest wait for the first connection; ``patience_s`` if that is less.
        wish: The number that this worker gets if it is free; -1 for any.
        reached_at: Name or number at which other workers reach this one; empty for this machine's
            end of the route to the coordinator.
        place: The place in a fixed team; ``None`` in an elastic one. A fixed team has no leases, so
            there are no heartbeats. It needs its coordinator only to form groups, so a connection
            that ends stays closed.
    """

    def __init__(
        self,
        address: str,
        *,
        token: bytes | None,
        member: str,
        facts: Mapping[str, Any],
        timeout_s: float,
        wish: int = NO_NUMBER,
        reached_at: str = "",
        place: FixedPlace | None = None,
    ) -> None:
        self._wish, self._given_address, self._place = wish, reached_at, place
        self._missing: list[int] | None = None  # from the coordinator
        self._session = secrets.token_hex(8)
        self._facts = dict(facts)
        self._held: Formation | None = None  # the last generation that this worker was in
        self._formed: Formation | None = None  # formed, and not yet returned
        self._asking: Message | None = None
        self._left_out = self._has_left = self._is_compared = False
        self._team_facts: dict[str, Any] = {}
        self._refusal: TeamRefusedError | None = None
        self._generation, self._is_open = 0, False
        self._number = NO_NUMBER
        self._wanted = self._leads = False
        self._over: dict[int, str] = {}
        self._refused: list[tuple[str, str]] = []
        self._lease_end_s = 0.0
        self._micro_batches, self._phase = 0, "setting up"
        self._asked: dict[int, Message] = {}  # requests to the store that wait for an answer
        self._answers: dict[int, Fields] = {}
        self._num_asked = 0
        self._put: dict[str, Message] = {}  # keys that were set in the store of this generation
        # The coordinator ran when the launcher started this worker. If it has ended since, the
        # worker would otherwise wait silently for the exchanges' whole timeout. The coordinator of
        # a fixed team may be started last.
        super().__init__(
            address,
            token=token,
            member=member,
            role="worker",
            timeout_s=timeout_s if place else min(timeout_s, Deadlines().patience_s),
            has_beats=place is None,
        )

    # ── membership ───────────────────────────────────────────────────────────────────────────────

    @property
    def generation(self) -> int:
        """The highest generation that has been formed, by the last message; 0 for none."""
        return self._generation

    @property
    def number(self) -> int:
        """This worker's number in the team; -1 while none is free."""
        return self._number

    def await_number(self, timeout_s: float) -> bool:
        """Wait until this worker has a number, and the coordinator forms generations.

        After its start the coordinator waits for members, so by then it knows the generation.
        """

        def is_known() -> bool:
            return self._number != NO_NUMBER and bool(self._generation or self._is_open)

        with self._changed:
            self._changed.wait_for(lambda: is_known() or self._refusal or self._failure, timeout_s)
            self.check()
            return is_known()

    @property
    def reached_at(self) -> str:
        """The address at which other workers reach this one."""
        if self._given_address:
            return self._given_address
        own = self.own_address
        # Many hosts map their own name to 127.0.1.1, which other hosts cannot reach.
        if is_loopback(own) and not is_loopback(self._host):
            return own_address(self._host, self._port)
        return own

    def next_generation(
        self, standing: Standing | None, unreached: Sequence[str] = ()
    ) -> Formation:
        """Leave the present generation, and wait for the next one.

        From now on this worker commits nothing in its previous generation.

        Args:
            standing: The state that this worker holds; ``None`` without state.
            unreached: Members of the present generation to which this worker could not connect.

        Returns:
            The next generation, of which this worker is a member.

        Raises:
            LeftOutError: The team has continued without it; it must drop its state and ask again,
                with ``None``.
            TeamRefusedError: The coordinator refuses it, or too few workers came in time.
            RunEndedError: The run has ended.
            CoordinatorLostError: The coordinator did not answer for ``patience_s``.
        """
        generation = self._held.generation if self._held else 0
        message = _report(generation, standing, unreached)
        with self._changed:
            self._lease_end_s = 0.0
            self._left_out, self._formed, self._asking = False, None, message
            self._post(message)
            # The coordinator answers within its timeout_s. A spare worker waits while the team is
            # complete; the connection notices if the coordinator does not answer.
            self._changed.wait_for(self._is_answered)
            self._asking = None
            self.check()
            if self._left_out:
                raise LeftOutError(
                    f"{self.member} was in generation {generation}, and the team continued without "
                    f"it to generation {self._generation}"
                )
            return self._take_formation()

    def meet_all(self, timeout_s: float) -> Formation:
        """Wait for all ranks of a fixed team, and return its only generation.

        Args:
            timeout_s: Longest wait.

        Raises:
            LaunchError: Some ranks did not connect; names them.
            TeamRefusedError: The coordinator refuses this rank.
            CoordinatorLostError: The coordinator did not answer for ``patience_s``.
        """
        assert self._place is not None
        with self._changed:
            self._asking = _report(0)
            self._post(self._asking)
            if not self._changed.wait_for(self._is_answered, timeout_s):
                self._post({"type": "missing"})
                self._changed.wait_for(
                    lambda: self._missing is not None or self._is_answered(), _ANSWER_S
                )
            if self._formed is None:
                self.check()
                raise self._late(self._place, timeout_s)
            return self._take_formation()

    def _late(self, place: FixedPlace, waited_s: float) -> LaunchError:
        waited = f"rank {place.rank} waited {waited_s:.0f} s for"
        if not self._missing:
            return LaunchError(
                f"{waited} the coordinator of its team at {self.address}, which does not answer: "
                "look at the output of rank 0"
            )
        return LaunchError(
            f"{waited} {name_ranks(self._missing)} of {place.world_size} to join: start the "
            "missing ranks, or look at their output"
        )

    def describe(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send further facts that must be the same on all members, and wait for the comparison.

        A coordinator that does not answer gets them after the reconnect.

        Returns:
            The facts of members, as far as the coordinator has answered.

        Raises:
            TeamRefusedError: A fact differs from that of another member.
        """
        with self._changed:
            self._facts |= facts
            self._is_compared = False
            self._post({"type": "facts", "facts": dict(facts)})
            self._changed.wait_for(
                lambda: self._is_compared or self._refusal or self._failure,
                self.deadlines.reconnect_s,
            )
            self.check()
            return self._team_facts

    def check(self) -> None:
        """Raise the error that has ended the connection for good, or the coordinator's refusal.

        Raises:
            CoordinatorLostError: The coordinator did not answer for ``patience_s``.
            TeamRefusedError: It refuses this worker.
        """
        failure: EvenerError | None = self._refusal or self._failure
        if failure is not None:
            raise failure

    @property
    def wants_change(self) -> bool:
        """Whether a worker waits to join, or members are fewer than the least."""
        return self._wanted

    @property
    def leads(self) -> bool:
        """Whether the team has no member left, and this worker chooses the state to begin with."""
        return self._leads

    def take_refused(self) -> list[tuple[str, str]]:
        """Return which workers the coordinator has refused since the last call, and why."""
        with self._changed:
            refused, self._refused = self._refused, []
        return refused

    @property
    def run_has_ended(self) -> bool:
        """Whether the coordinator has reported that the run has ended, without this worker."""
        return isinstance(self._refusal, RunEndedError)

    @property
    def is_lost(self) -> bool:
        """Whether the coordinator is lost for good, or refuses this worker for good."""
        return self._failure is not None

    def why_over(self, generation: int) -> str:
        """Return why a generation is over, by the coordinator's message; empty while it is not.

        A member that waits in an exchange of that generation must give up at once: another member
        is lost, or has left.
        """
        return self._over.get(generation, "")

    def lease_end_s(self) -> float:
        """Return when the lease ends, on ``lease_clock.now_s()``; nothing is committed later."""
        return self._lease_end_s

    def await_lease(self, timeout_s: float) -> bool:
        """Wait for a lease; return whether there is one. ``False``: the generation is over.

        Raises:
            CoordinatorLostError: The coordinator did not answer for ``patience_s``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._is_over() or lease_clock.now_s() < self._lease_end_s,
                timeout_s,
            )
            self.check()
            return lease_clock.now_s() < self._lease_end_s and not self._is_over()

    def declare(self, phase: str, done: int = 0) -> str:
        """Report what this worker is doing, with its next heartbeat; it does not block.

        A rank of a fixed team reports only long waits.

        Args:
            phase: ``TRAINING``, ``WAITING`` for others in an exchange, or another text, such as
                ``compiling``.
            done: Micro-batches computed since the last call.

        Returns:
            The previous phase.
        """
        before, self._phase = self._phase, phase
        self._micro_batches += done
        if self._place is not None and phase != before and WAITING in (before, phase):
            with self._changed:
                self._post(self._beat())  # it sends no other heartbeats
        return before

    def leave(self, *, finished: bool = False) -> None:
        """Leave the team for good, after this worker's last commit; wait for the confirmation.

        Args:
            finished: Whether the run has ended: it was completed, or the team was stopped.
        """
        with self._changed:
            self._lease_end_s = 0.0
            self._post({"type": "leave", "finished": finished})
            self._changed.wait_for(
                lambda: self._has_left or self._failure, self.deadlines.reconnect_s
            )

    def store(self, generation: int, timeout_s: float | None = None) -> "GenerationStore":
        """Return the keys and values of a generation, for forming its process groups.

        Args:
            generation: Its number.
            timeout_s: Longest wait for a key; ``timeout_s`` of the team by default.
        """
        patience_s = self.deadlines.timeout_s if timeout_s is None else timeout_s
        return GenerationStore(self, generation, patience_s)

    def ask_store(self, request: Message, timeout_s: float) -> Any:
        """Send a request to the store, and return the answer.

        After a reconnect it is sent again, together with all keys that this worker has set in this
        generation, since a restarted coordinator has lost them.

        Raises:
            RuntimeError: It failed; torch expects this type from a store.
        """
        with self._changed:
            self._num_asked += 1
            number = self._num_asked
            message = {"type": "store", "number": number, **request}
            self._asked[number] = message
            self._post(message)
            # A generation that is over still has keys, under which its members put why they gave
            # up. The coordinator itself ends waits for missing keys.
            self._changed.wait_for(
                lambda: number in self._answers or self._failure or self._closed,
                timeout_s + self.deadlines.reconnect_s,
            )
            del self._asked[number]
            answer = self._answers.pop(number, None)
            if answer is not None and request["what"] == "put":
                self._put[request["keys"][0]] = {**message, "number": 0}
        if answer is not None and "error" not in answer:
            return answer["value"]
        why = f"the coordinator at {self.address} has not answered"
        if answer is not None:
            why = answer.text("error")
        elif over := self._over.get(request["generation"]):
            why = f"its generation is over: {over}"
        raise RuntimeError(
            f"{self.member} waited up to {timeout_s:g} s for {request['keys']} of generation "
            f"{request['generation']}: {why}"
        )

    # ── the connection calls these, under its lock ───────────────────────────────────────────────

    def _introduction(self) -> Message:
        held = None if self._held is None else asdict(self._held)
        return {
            "session": self._session,
            "facts": self._facts,
            "held": held,
            "wish": self._wish,
            "address": self.reached_at,
            **({} if self._place is None else {"fixed": self._place._asdict()}),
        }

    def _may_return(self) -> bool:
        return self._place is None

    def _absent(self) -> EvenerError:
        if self._place is None:
            return super()._absent()
        return LaunchError(
            f"rank {self._place.rank} waited {self._timeout_s:.0f} s for the coordinator of its "
            f"team at {self.address} ({self._why}): start rank 0 there, and check the address "
            "(MASTER_ADDR), the port and the firewall between the hosts"
        )

    def _begin(self, welcome: Fields) -> list[Message]:
        # The coordinator may have executed an addition before the connection ended.
        asked = [one for one in self._asked.values() if one["what"] != "increase"]
        posted = [*self._put.values(), *asked]
        return posted if self._asking is None else [*posted, self._asking]

    def _beat(self) -> Message:
        return {
            "type": "beat",
            "micro_batches": self._micro_batches,
            "phase": self._phase,
            "at": lease_clock.now_s(),
        }

    def _handle(self, kind: str, fields: Fields) -> None:
        if kind == "beaten":
            self._generation, self._is_open = fields.whole("generation"), fields.flag("open")
            self._leads = fields.flag("leads")
            self._refused += zip(fields.texts("refused"), fields.texts("why_refused"), strict=True)
            is_own = self._held is not None and self._generation == self._held.generation
            if not is_own:
                self._number = fields.whole("number", least=NO_NUMBER)
            if fields.flag("renewed") and is_own and self._asking is None:
                self._lease_end_s = fields.number("at") + self.deadlines.lease_s
        elif kind == "formed":
            formation = read_message(Formation, fields)
            self._generation = formation.generation
            if self._asking is not None and self.member in formation.members:
                self._formed = formation
                self._asking, self._wanted = None, False
        elif kind == "over":
            self._over[fields.whole("generation")] = fields.text("why")
        elif kind == "wanted":
            self._wanted = fields.flag("value")
        elif kind == "left_out":
            self._generation = fields.whole("generation")
            self._left_out = self._asking is not None
        elif kind == "failed":
            self._refusal = TeamRefusedError(fields.text("why"))
        elif kind == "ended":
            self._refusal = RunEndedError(fields.text("why"))
        elif kind == "compared":
            self._is_compared, self._team_facts = True, fields.fields("facts").values
        elif kind == "missing":
            self._missing = [whole(number, "a rank") for number in fields.items("ranks")]
        elif kind == "left":
            self._has_left = True
        elif kind == "stored":
            number = fields.whole("number")
            if number in self._asked:
                self._answers[number] = fields

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _take_formation(self) -> Formation:
        formation, self._formed = self._formed, None
        assert formation is not None
        self._held = formation
        self._put.clear()
        self._number = formation.number_of(self.member)
        self._beat_soon()  # for the lease
        return formation

    def _is_answered(self) -> bool:
        return bool(self._formed or self._left_out or self._refusal or self._failure)

    def _is_over(self) -> bool:
        return self._held is not None and self._held.generation in self._over


def _report(
    generation: int, standing: Standing | None = None, unreached: Sequence[str] = ()
) -> Message:
    held = None if standing is None else asdict(standing)
    return {
        "type": "report", "generation": generation, "standing": held, "unreached": [*unreached],
    }  # fmt: skip


@final
class GenerationStore(Store):
    """The coordinator's keys of one generation, as a store for torch and Gloo.

    torch calls it from C++ through the Python object: keep a reference to it while a
    ``PrefixStore`` or a process group uses it.

    Args:
        link: Link to the coordinator.
        generation: Its number.
        timeout_s: Timeout of waits without their own.
    """

    def __init__(self, link: CoordinatorLink, generation: int, timeout_s: float) -> None:
        super().__init__()
        self._link, self._generation = link, generation
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("put", [key], value=content.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value; raise RuntimeError after the timeout."""
        return self._fetch(key, self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key (0 if it is not set), and return the sum."""
        return int(self._ask("increase", [key], amount=amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._ask("holds", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self._fetch(key, timeout or self._timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was set."""
        return bool(self._ask("remove", [key]))

    deleteKey = delete_key  # noqa: N815  # the name that C++ looks for

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits without their own."""
        self._timeout = timeout

    def _fetch(self, key: str, timeout: timedelta) -> bytes:
        timeout_s = timeout.total_seconds()
        answer: str = self._ask("fetch", [key], timeout_s, timeout_s=timeout_s)
        return answer.encode("latin-1")

    def _ask(self, what: str, keys: list[str], patience_s: float = 5.0, **more: Any) -> Any:
        request = {"generation": self._generation, "what": what, "keys": keys, **more}
        return self._link.ask_store(request, patience_s)
