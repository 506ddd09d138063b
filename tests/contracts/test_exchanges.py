"""Where ranks exchange something: a lost rank must not end those who remain, wherever it was."""

import ast

from helpers.source import Module, modules

#: Methods of communicators and teams by which ranks exchange something.
EXCHANGES = {
    *("all_reduce", "broadcast", "barrier", "introduce", "hear", "reduce_scatter_parts"),
    *("all_gather_bytes", "all_gather_json", "all_gather_parts", "all_gather_rows"),
}
#: Who may call them, and why a loss there is survived, or cannot be.
ALLOWED = {
    "averaging": "called by the engine, in a window or in a comparison of replicas",
    "engine.collectives": "the one mechanism for what is outside of windows: it repeats",
    "engine.engine": "learning rates that differ, in a window",
    "engine.generations": "a change of the team, which begins anew where a rank is lost in it",
    "engine.local": "windows",
    "engine.rounds": "rounds of rows, whose callers survive",
    "engine.consensus": "windows",
    "engine.training_state": "the team's state, in a change of the team",
    "engine.team": "what the others here call",
    "loop.assembly": "set-up: a team that loses a rank there has not begun",
    "team.backends": "set-up",
    "tasks.causal_lm": "set-up",
    "tasks.classification.labelled_data": "set-up",
    "tasks.resuming": "set-up, and loading in a cold restart",
    "tasks.run_changes": "set-up",
    "tasks.text.preparation": "set-up",
    "doctor.pair": "a team of two, whose loss is what it reports",
    "doctor.trials": "a team that only tries whether ranks can exchange",
    "manual": "a team of its own, without generations",
    "tasks.trainers": "a team of its own, without generations",
    "tasks.rehearsal": "measurements of fixed teams",
}
#: Other things of these names: sinks, and connections of launchers.
OTHERS = {"_sinks", "_peers"}


def receivers(module: Module) -> list[str]:
    """Whose methods of these names a module calls, by the last name before the dot."""
    found = []
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.func.attr in EXCHANGES:
            found.append(name)
    return found


def test_exchanges_outside_of_windows_go_through_the_engine() -> None:
    exchanging = set()
    for module in modules():
        is_other = module.name.split(".")[0] == "comm"
        if not is_other and {*receivers(module)} - OTHERS - {"engine", "_engine"}:
            whole = [name for name in ALLOWED if f"{module.name}.".startswith(f"{name}.")]
            exchanging.add(whole[0] if whole else module.name)
    assert exchanging - ALLOWED.keys() == set(), "call methods of Collectives instead"
    assert ALLOWED.keys() - exchanging == set(), "these exchange nothing any more"
