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
        token: The team's; ``None`` where it has none.
        member: Id of this worker, of which the team has one.
        facts: What must be the same on all members, such as the model's fingerprint.
        timeout_s: Longest wait for the first connection; ``patience_s`` if that is less.
        wish: The number that this worker has in the team if that is free; -1 for any.
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
        self._missing: list[int] | None = None  # as the coordinator has said
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
        # The coordinator was there when the launcher started this worker. If it has ended since,
        # the worker would wait in silence for all of the exchanges' timeout. That of a fixed team
        # may be started last.
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
        """The highest generation that has been formed, as last heard; 0 for none."""
        return self._generation

    @property
    def number(self) -> int:
        """This worker's number in the team; -1 as long as others have them all."""
        return self._number

    def await_number(self, timeout_s: float) -> bool:
        """Wait until this worker has a number, and the coordinator forms generations.

        It knows by then whether the team has one: after its start it waits for members of the
        team's generation.
        """

        def is_known() -> bool:
            return self._number != NO_NUMBER and bool(self._generation or self._is_open)

        with self._changed:
            self._changed.wait_for(lambda: is_known() or self._refusal or self._failure, timeout_s)
            self.check()
            return is_known()

    @property
    def reached_at(self) -> str:
        """Where other workers reach this one."""
        if self._given_address:
            return self._given_address
        own = self.own_address
        # Many hosts map their own name to 127.0.1.1, where no other host finds them.
        if is_loopback(own) and not is_loopback(self._host):
            return own_address(self._host, self._port)
        return own

    def next_generation(
        self, standing: Standing | None, unreached: Sequence[str] = ()
    ) -> Formation:
        """Leave the present generation, and wait for the next one.

        From here on this worker commits nothing in the generation that it was in.

        Args:
            standing: What this worker holds; ``None`` without state.
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
            # The coordinator answers within its timeout_s. A spare worker waits for as long as the
            # team is complete; a coordinator that does not answer is noticed by the connection.
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
        """Wait for all ranks of a fixed team, and return its one generation.

        Args:
            timeout_s: Longest wait.

        Raises:
            LaunchError: Some ranks did not come; names them.
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
            f"{waited} {name_ranks(self._missing)} of {place.world_size} to join: start what is "
            "missing, or look at its output"
        )

    def describe(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say more of what must be the same on all members, and wait until it has been compared.

        A coordinator that is away hears of it when it is there again.

        Returns:
            What members have said, as far as the coordinator has answered.

        Raises:
            TeamRefusedError: It differs from what another member has said.
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
        """Raise what has ended the connection for good, or why the coordinator refuses this worker.

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
        """Whether no member of the team is left, and this worker decides with what it begins."""
        return self._leads

    def take_refused(self) -> list[tuple[str, str]]:
        """Return which workers the coordinator has refused since the last call, and why."""
        with self._changed:
            refused, self._refused = self._refused, []
        return refused

    @property
    def run_has_ended(self) -> bool:
        """Whether the coordinator has said that the run has ended, without this worker."""
        return isinstance(self._refusal, RunEndedError)

    @property
    def is_lost(self) -> bool:
        """Whether the coordinator is lost for good, or refuses this worker for good."""
        return self._failure is not None

    def why_over(self, generation: int) -> str:
        """Return why a generation is over, as the coordinator has said; empty while it is not.

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
        """Say what this worker is doing, with its next heartbeat; costs nothing.

        A rank of a fixed team reports only long waits.

        Args:
            phase: ``TRAINING``, ``WAITING`` for others in an exchange, or in its own words, such as
                ``compiling``.
            done: Micro-batches that it has done since the last call.

        Returns:
            The phase before.
        """
        before, self._phase = self._phase, phase
        self._micro_batches += done
        if self._place is not None and phase != before and WAITING in (before, phase):
            with self._changed:
                self._post(self._beat())  # it has no others
        return before

    def leave(self, *, finished: bool = False) -> None:
        """Leave the team for good, after this worker's last commit; waits until that is known.

        Args:
            finished: The run has ended: it was done to its end, or the team was stopped.
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

        It is sent again with a new connection, as is what this worker has set in this generation: a
        coordinator that was started again knows nothing of either.

        Raises:
            RuntimeError: It failed, as torch expects it of a store.
        """
        with self._changed:
            self._num_asked += 1
            number = self._num_asked
            message = {"type": "store", "number": number, **request}
            self._asked[number] = message
            self._post(message)
            # A generation that is over still has keys: its members tell there why they gave up. The
            # coordinator itself ends the waits for those that are missing.
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
        # The coordinator may have carried out an addition before the connection ended.
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

    def _hear(self, kind: str, fields: Fields) -> None:
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
    """The keys of one generation, which the coordinator keeps, as torch and Gloo want to see them.

    torch calls it from C++ by way of the Python object: keep a reference to it for as long as a
    ``PrefixStore`` or a process group uses it.

    Args:
        link: To the coordinator.
        generation: Its number.
        timeout_s: For waits that state no time themselves.
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
        """Add to the number under a key, 0 where it is not set, and return the sum."""
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
        """Set the time for waits that state none themselves."""
        self._timeout = timeout

    def _fetch(self, key: str, timeout: timedelta) -> bytes:
        timeout_s = timeout.total_seconds()
        answer: str = self._ask("fetch", [key], timeout_s, timeout_s=timeout_s)
        return answer.encode("latin-1")

    def _ask(self, what: str, keys: list[str], patience_s: float = 5.0, **more: Any) -> Any:
        request = {"generation": self._generation, "what": what, "keys": keys, **more}
        return self._link.ask_store(request, patience_s)
