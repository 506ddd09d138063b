"""What fewer averages cost: held-out loss of CADENCE and ASYNC against SYNC, at equal samples.

    python benchmarks/convergence.py --results FILE.jsonl --study frontier
    python benchmarks/convergence.py --results FILE.jsonl --tables

Ranks are simulated in one process (``local_training.py``), so that every way of training gets the
same samples, and time and bytes are counted, not measured. Each is trained with three learning
rates, and the best counts. Results are added to the file; what is there is not trained again.
``--tables`` prints what the file holds, as Markdown, and trains nothing.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from local_training import Local, train
from torch import Tensor, nn

from evener.config.runs import ModelConfig, OptimizerConfig
from evener.engine.results import Progress
from evener.tasks.language_model import SMALL_LLAMA, build_model
from evener.tasks.optimization import WarmupCosine, make_optimizer
from evener.tasks.text.sources import stdlib_sources

VOCABULARY = 257
TASK = "llama-0.04M"
#: Bytes of the standard library's sources that are trained on, and held out.
TRAIN_BYTES, HELDOUT_BYTES = 4_000_000, 50_000


# ── what is trained ───────────────────────────────────────────────────────────────────────────────


class CharRnn(nn.Module):
    """A GRU over bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(batch, time, vocabulary)``."""
        return self.head(self.cell(self.tokens(ids))[0])


class Task:
    """A model, its data, and the learning rates that are tried.

    Attributes:
        batch_size: Samples of a step of SYNC.
        steps: Steps of SYNC.
    """

    batch_size = 16
    steps = 400

    def make(self) -> nn.Module:
        """Return the model, with weights of torch's random generator."""
        raise NotImplementedError

    def batch(self, samples: Tensor) -> Any:
        """Return the samples of these numbers, which count on from 0."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss."""
        raise NotImplementedError

    def heldout(self) -> list[Any]:
        """Return batches of what is not trained on."""
        raise NotImplementedError


class Text(Task):
    """Next bytes of the standard library's sources."""

    def __init__(self, model: Callable[[int], nn.Module], seq_len: int, seed: int) -> None:
        root, _ = stdlib_sources()
        files = sorted(p for p in root.glob("*.py"))
        text = b"".join(p.read_bytes() for p in files)[: HELDOUT_BYTES + TRAIN_BYTES]
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._heldout = whole[:HELDOUT_BYTES]
        self._train = whole[HELDOUT_BYTES : HELDOUT_BYTES + TRAIN_BYTES]
        self._seq_len = seq_len
        self._model = model
        places = len(self._train) // (seq_len + 1)
        self._order = torch.randperm(places, generator=torch.Generator().manual_seed(seed))

    def make(self) -> nn.Module:
        return self._model(self._seq_len)

    def batch(self, samples: Tensor) -> Tensor:
        starts = self._order[samples % len(self._order)] * (self._seq_len + 1)
        return self._train[starts[:, None] + torch.arange(self._seq_len + 1)].long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch[:, :-1])
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def heldout(self) -> list[Tensor]:
        size = self._seq_len + 1
        count = min(len(self._heldout) // size, 384)
        return list(self._heldout[: count * size].view(count, size).long().split(64))


class Digits(Task):
    """A small CNN on scikit-learn's digits."""

    batch_size = 32
    steps = 250

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        y = torch.tensor(digits.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        self._heldout, self._train = (
            (x[order[:400]], y[order[:400]]),
            (x[order[400:]], y[order[400:]]),
        )
        self._order = torch.cat(
            [
                torch.randperm(len(y) - 400, generator=torch.Generator().manual_seed(seed + n))
                for n in range(40)
            ]
        )

    def make(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
        )

    def batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        places = self._order[samples % len(self._order)]
        return self._train[0][places], self._train[1][places]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def heldout(self) -> list[tuple[Tensor, Tensor]]:
        return [self._heldout]


def llama(**keys: Any) -> Callable[[int], nn.Module]:
    """Return what makes the demo's model with these keys of its configuration."""
    config = ModelConfig(config=keys)
    return lambda seq_len: build_model(config, vocab_size=VOCABULARY, seq_len=seq_len, eos_id=256)


def shape(width: int, layers: int = 2) -> dict[str, Any]:
    """Return the demo's model with another width."""
    heads = max(1, width // 32)
    keys = {"hidden_size": width, "intermediate_size": 11 * width // 4}
    return {**SMALL_LLAMA, **keys, "num_attention_heads": heads, "num_key_value_heads": heads} | {
        "num_hidden_layers": layers
    }


#: Learning rates, the middle ones first.
RATES = {"cnn": (0.003, 0.01, 0.001, 0.0003)}
USUAL_RATES = (0.005, 0.01, 0.02, 0.0025)
TASKS: dict[str, Callable[[int], Task]] = {
    "llama-0.04M": lambda seed: Text(llama(**shape(32)), 32, seed),
    "llama-0.15M": lambda seed: Text(llama(**shape(64)), 64, seed),
    "llama-0.5M": lambda seed: Text(llama(), 128, seed),
    "llama-1M": lambda seed: Text(llama(**shape(160, 3)), 128, seed),
    "rnn": lambda seed: Text(lambda _: CharRnn(96), 64, seed),
    "cnn": Digits,
}


# ── one training ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training.

    Attributes:
        study: What it is for.
        task: One of ``TASKS``.
        how: The way of training.
        rate: Number of the learning rate.
        seed: Seed of weights and of the order of samples.
        split: Ranks share the batch of SYNC; otherwise each has one of that size, and ranks
            make fewer steps.
        part: Part of the samples, with a schedule of its own.
    """

    study: str
    task: str = TASK
    how: Local = field(default_factory=Local)
    rate: int = 1
    seed: int = 0
    split: bool = True
    part: float = 1.0

    @property
    def lr(self) -> float:
        """Return the learning rate."""
        return RATES.get(self.task, USUAL_RATES)[self.rate]

    @property
    def name(self) -> str:
        """Return what differs from the defaults."""
        told = [] if self.split else ["whole batches"]
        told += [] if self.part == 1 else [f"{self.part} of the samples"]
        plain = asdict(Local())
        for key, value in asdict(self.how).items():
            if value != plain[key]:
                told.append(f"{key} {value}")
        seed = f" seed {self.seed}" if self.seed else ""
        return f"{self.task}{seed}: {', '.join(told) or 'default'}"

    @property
    def key(self) -> str:
        """Return what tells it from others, whatever the study."""
        facts = {**asdict(self), "study": ""}
        if self.part == 1:
            del facts["part"]
        return json.dumps(facts, sort_keys=True)


def run(arm: Arm) -> dict[str, Any]:
    """Train; return what came of it."""
    torch.set_num_threads(1)
    task = TASKS[arm.task](arm.seed)
    size = task.batch_size // arm.how.ranks if arm.split else task.batch_size
    total = round(arm.part * task.steps) * task.batch_size // size
    settings = OptimizerConfig(lr=arm.lr, warmup=0.1)
    schedule = WarmupCosine(settings, "weight")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(arm.seed)
        model = task.make()
        return model, make_optimizer(model, settings)

    numbers = iter(range(10**9))

    def batches(*_: int) -> Any:
        first = next(numbers) * size
        return task.batch(torch.arange(first, first + size))

    started_s = time.perf_counter()
    found = train(
        arm.how,
        make,
        batches,
        task.loss,
        total,
        lambda done: schedule(Progress(weight=done)),
        max_norm=1.0,
    )
    model, _ = make()
    nn.utils.vector_to_parameters(found.consensus, model.parameters())
    with torch.no_grad():
        losses = [float(task.loss(model.eval(), batch)) for batch in task.heldout()]
    return {
        **asdict(arm),
        "key": arm.key,
        "loss": statistics.fmean(losses),
        "windows": found.windows,
        "sent_bytes": found.sent_bytes,
        "divergence": found.divergence,
        "params": found.consensus.numel(),
        "samples": total * size,
        "train_s": time.perf_counter() - started_s,
    }


# ── studies ───────────────────────────────────────────────────────────────────────────────────────

SYNC = Local(ranks=1, steps=1)
AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0}
#: Learning rate and momentum of the outer optimizer.
OUTER = [(1.0, 0.0), (0.8, 0.2), (0.5, 0.5), (0.3, 0.7), (0.7, 0.5), (0.7, 0.9)]


def studies() -> dict[str, list[Arm]]:
    """Return the arms of each study, with the middle learning rate."""

    def arm(study: str, split: bool = True, seed: int = 0, task: str = TASK, **how: Any) -> Arm:
        return Arm(study=study, how=Local(**how), split=split, seed=seed, task=task)

    found: dict[str, list[Arm]] = {"sync": [Arm(study="sync", how=SYNC)]}
    found["parts"] = [Arm(study="parts", how=SYNC, part=part) for part in (0.75, 0.2)]
    for steps in (4, 16, 64):
        name = f"outer{steps}"
        found[name] = [
            arm(name, steps=steps, outer_lr=lr, outer_momentum=momentum) for lr, momentum in OUTER
        ]
    found["whole"] = [
        arm("whole", split=False, outer_lr=lr, outer_momentum=momentum) for lr, momentum in OUTER
    ]
    found["frontier"] = [arm("frontier", steps=steps) for steps in (4, 8, 64, 2, 32, 256)]
    found["frontier"] += [
        arm("frontier", steps=steps, warmup=warmup, shrink=shrink)
        for steps, warmup, shrink in (
            (64, 0.1, False),
            (64, 0.25, False),
            (64, 0.0, True),
            (32, 0.0, True),
            (32, 0.1, False),
        )
    ]
    for steps in (16, 64):
        name = f"candidates{steps}"
        found[name] = [
            arm(name, steps=steps, **how)
            for how in (
                {"warmup": 0.1},
                {"warmup": 0.25},
                {"shrink": True},
                {"moments": True},
                {"pull": 0.5},
                {"moments": True, "warmup": 0.1},
            )
        ]
    late = [(base, late) for base in ("own", "mixed", "late") for late in (0.25, 1.0)]
    found["late"] = [arm("late", base=base, late=late) for base, late in late]
    for outer_lr, momentum in OUTER[1:4]:
        outer = {"outer_lr": outer_lr, "outer_momentum": momentum}
        found["late"] += [
            arm("late", base=base, late=1.0, **outer) for base in ("own", "eager", "mixed")
        ]
    found["wire"] = [arm("wire", steps=s, bits=b) for s in (64, 16) for b in (8, 4, 2)]
    found["auto"] = [
        arm("auto", ranks=ranks, steps=steps, outer_lr=lr, outer_momentum=0.5)
        for ranks, steps in ((2, 64), (2, 16))
        for lr in (0.7, 1.0)
    ]
    found["seeds"] = [
        one
        for seed in (1, 2)
        for one in (
            Arm(study="seeds", how=SYNC, seed=seed),
            *(arm("seeds", steps=steps, seed=seed) for steps in (8, 16, 64)),
            arm("seeds", late=0.25, seed=seed),
        )
    ]
    found["ranks"] = [arm("ranks", ranks=ranks, steps=s) for ranks in (4, 8) for s in (16, 64)]
    found["ranks"].append(arm("ranks", ranks=4, outer_lr=0.7, outer_momentum=0.5))
    found["others"] = [
        one
        for task in ("cnn", "rnn")
        for one in (
            Arm(study="others", how=SYNC, task=task),
            *(arm("others", steps=steps, task=task) for steps in (4, 16, 64)),
            arm("others", task=task, outer_lr=0.7, outer_momentum=0.5),
            arm("others", task=task, late=0.25),
        )
    ]
    outers = ((1.0, 0.0), (0.7, 0.5), (1.0, 0.3), (0.4, 0.9), (0.7, 0.9))
    found["cnn"] = [
        Arm(study="cnn", task="cnn", how=SYNC),
        *(
            arm("cnn", task="cnn", steps=steps, outer_lr=lr, outer_momentum=momentum)
            for steps in (16, 4, 64)
            for lr, momentum in outers
        ),
        *(
            arm("cnn", task="cnn", late=1.0, base=base, outer_lr=lr, outer_momentum=momentum)
            for lr, momentum in outers[:2]
            for base in ("own", "eager", "mixed")
        ),
        *(
            arm("cnn", task="cnn", ranks=4, outer_lr=lr, outer_momentum=momentum)
            for lr, momentum in outers
        ),
    ]
    found["weights"] = [
        arm("weights", steps=16, speeds=(1.0, 1 / 3), power=power, seed=seed)
        for seed in (1, 2)
        for power in (1.0, 2.0)
    ]
    smooth = {"outer_lr": 0.5, "outer_momentum": 0.5, "base": "eager"}
    found["eager"] = [arm("eager", late=0.25, **smooth)]
    for seed in (1, 2):
        found["eager"] += [
            arm("eager", late=1.0, seed=seed),
            arm("eager", late=1.0, seed=seed, **smooth),
        ]
    found["low"] = [
        Arm(study="low", how=SYNC),
        *(arm("low", steps=steps) for steps in (8, 16, 64)),
        arm("low", outer_lr=0.7, outer_momentum=0.5),
        arm("low", outer_lr=0.7, outer_momentum=0.9),
    ]
    larger = "llama-0.5M"
    found["larger"] = [Arm(study="larger", how=SYNC, task=larger)]
    found["larger"] += [arm("larger", task=larger, steps=steps) for steps in (4, 16, 64)]
    found["larger"] += [
        arm("larger", task=larger, outer_lr=0.7, outer_momentum=0.5),
        arm("larger", task=larger, ranks=4),
        arm("larger", task=larger, late=0.25),
    ]
    found["unequal"] = [
        arm("unequal", steps=s, speeds=(1.0, 1 / 3), power=power)
        for s in (16, 48)
        for power in (1.0, 0.0, 2.0)
    ]
    return found


# ── results ───────────────────────────────────────────────────────────────────────────────────────


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Return what a file of results holds, by key."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def tables(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table for each study, in Markdown; each arm with its best learning rate."""
    parts = []
    for name, arms in studies().items():
        lines = []
        for arm in arms:
            found, sync = _best(arm, rows), _best(_sync_of(arm), rows)
            if found is None or sync is None:
                continue
            cells = [
                arm.name,
                f"{found['loss']:.4f}",
                f"{found['loss'] / sync['loss'] - 1:+.1%}",
                f"{replace(arm, rate=found['rate']).lr:g}",
                str(found["windows"]),
                f"{found['sent_bytes'] / 1e6:.2f}",
                f"{found['divergence']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        if lines:
            head = "| way | held-out loss | against SYNC | lr | averages | MB sent | divergence |"
            parts.append("\n".join([f"**{name}**\n", head, "|---" * 7 + "|", *lines]))
    return "\n\n".join(parts) + "\n"


def _sync_of(arm: Arm) -> Arm:
    return Arm(study="", task=arm.task, seed=arm.seed, how=SYNC)


def _best(arm: Arm, rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the result with the learning rate that is best for the arm, if there is any."""
    keys = [replace(arm, rate=rate).key for rate in range(len(USUAL_RATES))]
    return min((rows[k] for k in keys if k in rows), key=lambda row: row["loss"], default=None)


def picture(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the frontier of plain averages as an SVG: loss against SYNC over local steps."""
    points = []
    for steps in (2, 4, 8, 16, 32, 64, 256):
        arm = Arm(study="", how=Local(steps=steps))
        found, sync = _best(arm, rows), _best(_sync_of(arm), rows)
        if found is not None and sync is not None:
            points.append((steps, 100 * (found["loss"] / sync["loss"] - 1)))
    marks = []
    for steps, percent in points:
        x, y = 40 + 60 * math.log2(steps), 260 - 30 * percent
        marks.append(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4"/>'
            f'<text x="{x:.0f}" y="280">{steps}</text>'
            f'<text x="{x + 6:.0f}" y="{y - 6:.0f}">+{percent:.1f} %</text>'
        )
    title = "Held-out loss against SYNC by local steps of a rank between averages"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300" font-size="12" '
        f'font-family="sans-serif"><title>{title}</title><path d="M60 260H560" stroke="#888"/>'
        f"{''.join(marks)}</svg>\n"
    )


def main() -> None:
    """Train the arms of a study that the file lacks, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--study", action="append", default=[], choices=list(studies()))
    parser.add_argument("--rates", default="3,0,1", help="numbers of the learning rates")
    parser.add_argument("--tables", action="store_true", help="print tables; train nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the frontier there")
    arguments = parser.parse_args()
    if arguments.tables:
        print(tables(read(arguments.results)))
    if arguments.picture:
        arguments.picture.write_text(picture(read(arguments.results)), encoding="utf-8")
    rates = [int(rate) for rate in arguments.rates.split(",")]
    for rate in rates:
        for arm in [replace(arm, rate=rate) for s in arguments.study for arm in studies()[s]]:
            if arm.key in read(arguments.results):
                continue
            row = run(arm)
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['loss']:.4f} {row['train_s']:.0f}s {arm.lr} {arm.name}", flush=True)


if __name__ == "__main__":
    main()
