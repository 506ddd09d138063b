"""The roster in virtual time: no split brain, progress, and single rules."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from unit.protocol.elastic_world import Worker, World

#: By name, what may happen to one worker; common things more often than faults.
ACTIONS: dict[str, tuple[int, Callable[[World, Worker], object]]] = {
    "step": (8, World.step),
    "deliver": (5, World.deliver),
    "hear": (5, World.hear),
    "beat": (4, World.beat),
    "connect": (3, World.connect),
    "give up": (1, World.give_up),
    "cut": (1, World.cut),
    "stop": (1, World.stop),
    "resume": (1, World.resume),
    "kill": (1, lambda world, worker: world.kill(worker, told=True)),
    "die unseen": (1, lambda world, worker: world.kill(worker, told=False)),
    "start": (1, lambda world, _: world.start()),
    "crash": (1, lambda world, _: world.crash()),
    "restart": (2, lambda world, _: world.restart()),
    "0.25 s": (4, lambda world, _: world.wait(0.25)),
    "1 s": (2, lambda world, _: world.wait(1.0)),
    "3 s": (1, lambda world, _: world.wait(3.0)),
}
NAMES = [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 5),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 7)), max_size=150),
    st.floats(0.0, 12.0),
)
def test_no_two_generations_commit_unlike_windows_and_the_team_goes_on(
    least: int, most: int, actions: list[tuple[str, int]], warm_s: float
) -> None:
    world = World(min(least, most), most)
    for _ in range(most):
        world.start()
    world.settle(warm_s)  # World.commit checks each commit
    for name, number in actions:
        ACTIONS[name][1](world, world.workers[number % len(world.workers)])
    before = len(world.commits)
    world.settle(20.0)
    assert len(world.commits) > before, "the team commits windows again"
