"""Held-out loss of unequal ranks against one process, after the same samples.

    python benchmarks/same_result.py --json same_result.json

Each seed trains one small Llama on Python's own sources three times with ``evener pretrain``: in
one process, on two ranks, and on three, some of them emulated slower and so given less. ``change``
is the relative difference of the held-out loss from that of the one process. Beside it stands how
much one process differs from itself with another seed: what nobody would call another result.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import load_before, write_report
from options import make_parser
from runs import pretrain, settings


@dataclass(frozen=True)
class Team:
    """Ranks, and which of them are emulated slower."""

    ranks: int
    slow: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """For the command line."""
        emulated = [word for spec in self.slow for word in ("--emulate-slow", spec)]
        return ["--nproc", str(self.ranks), *emulated]


#: The first is what the others are compared with.
TEAMS = (Team(1), Team(2, ("1:3",)), Team(3, ("1:2", "2:4")))

MODEL = (
    "model.config.hidden_size=64",
    "model.config.intermediate_size=176",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "model.config.tie_word_embeddings=true",
)
RUN = ("data.seq_len=64", "batch_size=32", "optimizer.lr=3e-3", "eval.every=0")
REST = ("eval.max_sequences=256", "checkpoint.every=0", "sample.num_tokens=0")


def main() -> None:
    """Trains every team with every seed."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--teams", type=int, default=len(TEAMS), help="how many, from one rank on")
    parser.add_argument("--data", metavar="PATH", help="instead of Python's own sources")
    arguments = parser.parse_args()
    before = load_before()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            alone = None
            for team in TEAMS[: arguments.teams]:
                keys = [f"max_steps={arguments.steps}", f"seed={seed}"]
                keys += [f"data.path={arguments.data}"] if arguments.data else []
                row = train(Path(folder), team, seed, keys)
                alone = row["heldout_loss"] if alone is None else alone
                row["change"] = row["heldout_loss"] / alone - 1
                rows.append(row)
                shares = ", ".join(f"{part:.1%}" for part in row["samples_by_rank"])
                print(
                    f"seed {seed}, {team.ranks} rank(s): held-out loss {row['heldout_loss']:.6f}, "
                    f"change {row['change']:+.6%}, samples by rank {shares}"
                )
    worst = max(abs(row["change"]) for row in rows)
    alone = [row["heldout_loss"] for row in rows if row["ranks"] == 1]
    spread = (max(alone) - min(alone)) / statistics.mean(alone)
    print(f"largest change {worst:.6%}; one process differs between seeds by {spread:.2%}")
    write_report(arguments, before, rows, largest_change=worst, spread_between_seeds=spread)


def train(folder: Path, team: Team, seed: int, keys: Sequence[str]) -> dict[str, Any]:
    """One run."""
    run = pretrain(
        folder,
        *team.options,
        *settings((*MODEL, *RUN, *REST, *keys)),
        name=f"seed-{seed}-ranks-{team.ranks}",
    )
    committed = run.summary["committed_samples"]
    return {
        "name": f"ranks={team.ranks}",
        "ranks": team.ranks,
        "emulated_slow": list(team.slow),
        "seed": seed,
        "heldout_loss": run.summary["heldout_loss"],
        "samples": committed,
        "tokens": run.summary["committed_tokens"],
        "steps": run.summary["steps"],
        "samples_by_rank": [round(r["samples"] / committed, 4) for r in run.summary["ranks"]],
        "elapsed_s": round(run.elapsed_s, 2),
    }


if __name__ == "__main__":
    main()
