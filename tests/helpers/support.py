"""Runs every combination of policy, backend and team, and writes the tables of docs/support.md.

    PYTHONPATH=src:tests .venv/bin/python -m helpers.support

``tests/processes/test_support.py`` runs the same and compares.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from evener import ApplyPolicy, AverageBackend, ConfigError, Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.team.backends import ExchangeFacts, decide_backend
from helpers.gpu_facts import ON_GPU
from helpers.limits import PATIENCE_S
from helpers.models import mlp, regression_data
from helpers.ranks import Rank, run_ranks
from helpers.teams import run_team

PATH = Path(__file__).resolve().parents[2] / "docs" / "support.md"

#: (policy, backend) -> what became of it: ``works (...)`` or the message of a refusal.
Outcomes = Mapping[tuple[str, str], str]

COMBINATIONS = [(p.value, b.value) for p in ApplyPolicy for b in AverageBackend]

BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def train(policy: str, backend: str, communicator: Communicator | None = None) -> str:
    """Trains for a few windows on this rank; says how that went, in the same words everywhere."""
    x, y = regression_data(64)
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        ddp = Ddp.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            policy=policy,
            backend=backend,
            devices="cpu",
            communicator=communicator,
            config=DdpConfig(quiet=True, timeout_s=PATIENCE_S),
        )
    except ConfigError as error:
        return str(error)
    with ddp:
        data = torch.utils.data.TensorDataset(x, y)
        loader = ddp.loader(data, batch_size=8, micro_batch_size=4)
        for epoch in range(2):
            for inputs, targets in loader.epoch(epoch):
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
        with ddp.assembly.engine.consensus.shown():  # working copies differ between averagings
            own = {"hash": str([p.tolist() for p in model.parameters()])}
            after = [p.detach().clone() for p in model.parameters()]
        hashes = ddp.assembly.team.introduce(own)
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert moved, f"{policy}/{backend}: the model has not moved"
        assert len({h["hash"] for h in hashes}) == 1, f"{policy}/{backend}: ranks disagree"
        return f"works ({ddp.assembly.comm.backend})"


def one_rank() -> Outcomes:
    """A team of one, in this process."""
    return {c: train(*c) for c in COMBINATIONS}


def _try_all(_: Rank) -> Outcomes:
    return one_rank()


def processes() -> Outcomes:
    """Two ranks in processes of their own."""
    first, second = run_ranks(_try_all, 2)
    assert first == second, "ranks were told different things"
    outcomes: Outcomes = first
    return outcomes


def threads() -> Outcomes:
    """Two ranks on threads, over a communicator that is handed to ``Ddp.setup``."""
    found = {}
    for policy, backend in COMBINATIONS:

        def body(comm: Communicator, policy: str = policy, backend: str = backend) -> str:
            return train(policy, backend, comm)

        first, second = run_team(2, body)
        assert first == second, "ranks were told different things"
        found[policy, backend] = first
    return found


def teams_of_gpus() -> Mapping[str, Mapping[str, str]]:
    """What teams of GPUs would agree on, by team and backend; decided as real ranks decide."""
    cpu = {"device": "cpu", "vendor": "", "gpu": "", "nccl": ""}
    teams = {
        "a GPU for each rank": {"device": "cuda:1", "gpu": "GPU-1"},
        "two ranks on one GPU": {},
        "a GPU and a CPU": cpu,
        "more ranks than GPUs": {**cpu, "num_gpus": 1},
        "NVIDIA and AMD": {"device": "cuda:1", "gpu": "GPU-1", "vendor": "AMD", "nccl": "2.26"},
        "NVIDIA and Intel": {**cpu, "device": "xpu:0"},
        "NCCL 2.29 and 2.27": {"device": "cuda:1", "gpu": "GPU-1", "nccl": "2.27"},
    }
    table: dict[str, dict[str, str]] = {}
    for name, changes in teams.items():
        table[name] = {}
        for backend in AverageBackend:
            facts = _facts(ON_GPU, backend=backend.value, num_gpus=changes.get("num_gpus", 2))
            other = _facts(facts, **changes)
            try:
                table[name][backend.value] = decide_backend([facts, other])[0]
            except ConfigError as error:
                table[name][backend.value] = str(error)
    return table


def _facts(facts: ExchangeFacts, **changes: object) -> ExchangeFacts:
    return replace(facts, **changes)  # type: ignore[arg-type]


def tables(alone: Outcomes, in_processes: Outcomes, on_threads: Outcomes) -> str:
    """The generated part of docs/support.md."""
    notes: list[str] = []

    def cell(text: str) -> str:
        if text.startswith("works"):
            return text.replace("works", "yes")
        return text if text in ("nccl", "gloo", "shared") else f"no [{_note(notes, text)}]"

    lines = [
        "## Ranks on the CPU",
        "",
        "| policy | backend | one rank | processes | threads of one process |",
        "|---|---|---|---|---|",
    ]
    for policy, backend in COMBINATIONS:
        cells = [cell(o[policy, backend]) for o in (alone, in_processes, on_threads)]
        lines.append(f"| `{policy}` | `{backend}` | {' | '.join(cells)} |")
    names = " | ".join(f"`{backend.value}`" for backend in AverageBackend)
    lines += ["", "## Ranks on GPUs", "", f"| two ranks | {names} |", "|---|---|---|---|---|"]
    for team, row in teams_of_gpus().items():
        lines.append(f"| {team} | {' | '.join(cell(text) for text in row.values())} |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/support.md with the tables that running everything gives."""
    prose, _, rest = PATH.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return prose + BEGIN + tables(one_rank(), processes(), threads()) + END + after


def _note(notes: list[str], text: str) -> int:
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


if __name__ == "__main__":
    PATH.write_text(page())
