"""What fewer averages cost: held-out loss of CADENCE and ASYNC against SYNC, at equal samples.

    python benchmarks/convergence.py --study frontier wire    # train what the results lack
    python benchmarks/convergence_report.py                   # draw tables and pictures

Ranks are simulated in one process (``local_training.py``), so that every way of training gets the
same samples, and time and bytes are counted, not measured. Results are added to
``convergence.jsonl``; what is there is not trained again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import count, groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from local_training import FlatModel, Local, one_by_one, stacked, train, train_together
from torch import Tensor, nn
from torch.nn import Parameter

from evener.config.runs import ModelConfig, OptimizerConfig
from evener.engine.results import Progress
from evener.tasks.language_model import SMALL_LLAMA, build_model
from evener.tasks.optimization import WarmupCosine
from evener.tasks.text.sources import stdlib_sources

VOCABULARY = 257
TASK = "llama-0.04M"
RESULTS = Path(__file__).with_suffix(".jsonl")
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
    """A model and its data.

    Attributes:
        batch_size: Samples of a step of SYNC.
        steps: Steps of SYNC in a training of length 1.
        stacks: Whether one call may compute the losses of several ranks: they are small, and
            ``torch.vmap`` supports the model.
    """

    batch_size = 16
    steps = 400
    stacks = False

    def make(self) -> nn.Module:
        """Return the model, with weights of torch's random generator."""
        raise NotImplementedError

    def batch(self, samples: Tensor) -> Any:
        """Return the samples of these numbers, which count on from 0."""
        raise NotImplementedError

    def loss(self, model: Callable[[Tensor], Any], batch: Any) -> Tensor:
        """Return the mean loss."""
        raise NotImplementedError

    def heldout(self) -> list[Any]:
        """Return batches of what is not trained on."""
        raise NotImplementedError


@cache
def text_bytes() -> Tensor:
    """Return the text that is held out, and then what is trained on."""
    root, _ = stdlib_sources()
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text[: HELDOUT_BYTES + TRAIN_BYTES]), dtype=torch.uint8)


class Text(Task):
    """Next bytes of the standard library's sources."""

    def __init__(
        self, model: Callable[[int], nn.Module], seq_len: int, seed: int, stacks: bool = False
    ) -> None:
        self.stacks = stacks
        whole = text_bytes()
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

    def loss(self, model: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
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

    def loss(self, model: Callable[[Tensor], Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def heldout(self) -> list[tuple[Tensor, Tensor]]:
        return [self._heldout]


def llama(**keys: Any) -> Callable[[int], nn.Module]:
    """Return what makes the demo's model with these keys of its configuration."""
    config = ModelConfig(config=keys)

    def make(seq_len: int) -> nn.Module:
        model = build_model(config, vocab_size=VOCABULARY, seq_len=seq_len, eos_id=256)
        model.set_attn_implementation("eager")  # what vmap supports
        return model

    return make


def shape(width: int, layers: int = 2) -> dict[str, Any]:
    """Return the demo's model with another width."""
    heads = max(1, width // 32)
    keys = {"hidden_size": width, "intermediate_size": 11 * width // 4}
    return {**SMALL_LLAMA, **keys, "num_attention_heads": heads, "num_key_value_heads": heads} | {
        "num_hidden_layers": layers
    }


TASKS: dict[str, Callable[[int], Task]] = {
    "llama-0.04M": lambda seed: Text(llama(**shape(32)), 32, seed, stacks=True),
    "llama-0.5M": lambda seed: Text(llama(), 128, seed),
    "llama-1M": lambda seed: Text(llama(**shape(160, 3)), 128, seed),
    "llama-5M": lambda seed: Text(llama(**shape(320, 4)), 128, seed),
    "rnn": lambda seed: Text(lambda _: CharRnn(96), 64, seed),
    "cnn": Digits,
}


# ── one training ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training.

    Attributes:
        how: The way of training.
        task: One of ``TASKS``.
        lr: The learning rate.
        seed: Seed of weights and of the order of samples.
        length: Samples, relative to those of the task; with a schedule of its own.
        whole: Each rank has a batch of the size of SYNC, and ranks make fewer steps; otherwise
            they share it.
    """

    how: Local = field(default_factory=Local)
    task: str = TASK
    lr: float = 0.005
    seed: int = 0
    length: float = 1.0
    whole: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """Return what differs from the defaults, by name."""
        pairs = [(self, Arm()), (self.how, Local())]
        found = {}
        for mine, usual in pairs:
            for name in (one.name for one in fields(mine) if one.name != "how"):
                value = getattr(mine, name)
                if value != getattr(usual, name):
                    found[name] = value
        return found

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Arm":
        """Return the arm of these facts; other keys are ignored."""
        local = {one.name: facts[one.name] for one in fields(Local) if one.name in facts}
        if "speeds" in local:
            local["speeds"] = tuple(local["speeds"])
        own = {one.name: facts[one.name] for one in fields(cls) if one.name in facts}
        return cls(how=Local(**local), **own)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a training; see ``Outcome``.

    Attributes:
        loss: Held-out loss of the consensus.
        params: Parameters of the model.
    """

    loss: float
    params: int
    windows: int
    fast_steps: float
    sent_bytes: int
    divergence: float


def make_optimizer(
    vector: Tensor, num_decayed: int, settings: OptimizerConfig
) -> torch.optim.AdamW:
    """Return the optimizer of ``evener pretrain``, of a vector of parameters."""
    parts = (vector[:num_decayed], settings.weight_decay), (vector[num_decayed:], 0.0)
    groups = [{"params": [Parameter(part)], "weight_decay": decay} for part, decay in parts]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )


def batch_size(arm: Arm) -> int:
    """Return the samples of a local step."""
    size = TASKS[arm.task](arm.seed).batch_size
    return size if arm.whole else size // arm.how.ranks


def run(arms: Sequence[Arm]) -> list[Result]:
    """Train side by side; the arms have one task and one batch size."""
    torch.set_num_threads(1)
    flats, tasks, trainings = [], [], []
    for arm in arms:
        task = TASKS[arm.task](arm.seed)
        torch.manual_seed(arm.seed)
        flat = FlatModel(task.make())
        flats.append(flat)
        tasks.append(task)
        trainings.append(_training(arm, task, flat))

    def loss_at(vector: Tensor, batch: Any) -> Tensor:
        return tasks[0].loss(lambda inputs: flats[0](vector, inputs), batch)

    gradients = (stacked if tasks[0].stacks else one_by_one)(loss_at)
    results = []
    for task, found in zip(tasks, train_together(trainings, gradients), strict=True):
        with torch.no_grad():
            losses = [float(loss_at(found.consensus, batch)) for batch in task.heldout()]
        results.append(
            Result(
                loss=round(statistics.fmean(losses), 5),
                params=found.consensus.numel(),
                windows=found.windows,
                fast_steps=round(found.fast_steps, 2),
                sent_bytes=found.sent_bytes,
                divergence=round(found.divergence, 4),
            )
        )
    return results


def _training(arm: Arm, task: Task, flat: FlatModel) -> Any:
    size = batch_size(arm)
    settings = OptimizerConfig(lr=arm.lr, warmup=0.1)
    schedule = WarmupCosine(settings, "weight")
    firsts = count(0, size)

    def batches(*_: int) -> Any:
        first = next(firsts)
        return task.batch(torch.arange(first, first + size))

    return train(
        arm.how,
        flat.vector,
        lambda vector: make_optimizer(vector, flat.num_decayed, settings),
        batches,
        round(arm.length * task.steps) * task.batch_size // size,
        lambda done: schedule(Progress(weight=done)),
        max_norm=1.0,
    )


# ── studies ───────────────────────────────────────────────────────────────────────────────────────

SYNC = Local(ranks=1, steps=1)
SEEDS = (0, 1, 2)
THIRD = (1.0, 1 / 3)
AVERAGE = (1.0, 0.0)


def grid(outer: Sequence[tuple[float, float]] = (AVERAGE,), **axes: Sequence[Any]) -> list[Arm]:
    """Return an arm for each combination of values of the fields of ``Arm`` and ``Local``.

    Args:
        outer: Learning rates and momenta of the outer optimizer.
        axes: Values of each field.
    """
    pairs = [{"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in outer]
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [Arm.of({**point, **pair}) for point in points for pair in pairs]


#: Outer optimizers around the best: learning rate and momentum.
OUTERS = (AVERAGE, (0.5, 0.5), (0.7, 0.5), (1.0, 0.5), (1.4, 0.5), (0.4, 0.9))
RATES = (0.005, 0.0025, 0.01)
#: SYNC, CADENCE, ASYNC, and CADENCE with an outer optimizer.
WAYS = [
    *grid(ranks=[1], steps=[1]),
    *grid(steps=[4, 16, 64]),
    *grid(late=[0.25]),
    *grid([(0.7, 0.5)]),
]
STUDIES = {
    "sync": [
        *grid(ranks=[1], steps=[1], lr=RATES, length=[1.0, 4.0]),
        *grid(ranks=[1], steps=[1], lr=RATES[::2], seed=SEEDS, length=[1.0, 4.0]),
    ],
    "frontier": [
        *grid(ranks=[2, 4, 8], steps=[4, 16, 64, 256], seed=SEEDS),
        *grid(ranks=[2, 4, 8], lr=RATES),
        *grid(ranks=[4], lr=[0.01], seed=SEEDS),
        *grid(steps=[2, 8, 32], seed=SEEDS),
        *grid(whole=[True], lr=RATES),
    ],
    "outer": [
        *grid(OUTERS, ranks=[2, 4, 8], steps=[16, 64, 256], length=[4.0]),
        *grid([AVERAGE, (0.7, 0.5), (1.0, 0.5)], ranks=[2, 8], seed=SEEDS, length=[4.0]),
        *grid([AVERAGE, (0.7, 0.5), (1.0, 0.5)], ranks=[2, 8], lr=[0.01], length=[4.0]),
        *grid([AVERAGE, (1.0, 0.5)], ranks=[8], lr=[0.0025], length=[4.0]),
        *grid([(2.0, 0.5)], ranks=[8], steps=[16, 256], length=[4.0]),
    ],
    "short": grid(
        [(0.8, 0.2), (0.5, 0.5), (0.7, 0.5), (1.0, 0.5), (0.3, 0.7), (0.4, 0.9), (0.7, 0.9)],
        lr=[0.005, 0.01],
    ),
    "one": [
        *grid([(0.3, 0.5), *OUTERS[1:]], ranks=[1], steps=[4, 16, 64], length=[1.0, 4.0]),
        *grid([(0.7, 0.5)], ranks=[1], seed=SEEDS, lr=RATES[::2], length=[4.0]),
    ],
    "async": grid([AVERAGE, (0.5, 0.5), (0.7, 0.5)], late=[0.25, 1.0], seed=SEEDS),
    "wire": grid(steps=[16, 64], bits=[8, 4]),
    "speeds": grid(speeds=[THIRD], steps=[16, 48], seed=SEEDS),
    "lengths": [
        *grid(ranks=[1], steps=[1], length=[0.125, 0.25, 0.5, 0.75, 1.0]),
        *grid(steps=[16, 64], speeds=[(), THIRD], length=[0.25, 0.5, 1.0]),
        *grid(late=[0.25, 1.0], speeds=[(), THIRD], length=[0.25, 0.5, 1.0]),
    ],
    "tasks": [
        replace(arm, task=task, lr=lr)
        for task, rates in {"rnn": RATES, "cnn": (0.01, 0.003, 0.0003)}.items()
        for lr in rates
        for arm in WAYS
    ],
    "larger": [replace(arm, task="llama-1M", lr=0.0025, length=0.5) for arm in WAYS],
    "largest": [replace(arm, task="llama-5M", lr=0.0025, length=0.25) for arm in WAYS],
}


# ── results ───────────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> dict[Arm, Result]:
    """Return what a file of results holds."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
    names = [one.name for one in fields(Result)]
    return {Arm.of(row): Result(**{name: row[name] for name in names}) for row in rows}


def groups(arms: Iterable[Arm], most: int = 16) -> Iterator[list[Arm]]:
    """Yield arms that can be trained side by side, about this many ranks each time."""

    def kind(arm: Arm) -> tuple[str, float, int]:
        return arm.task, arm.length, batch_size(arm)

    for (task, _, _), alike in groupby(sorted(arms, key=kind), kind):
        group: list[Arm] = []
        for arm in alike:
            group.append(arm)
            if not TASKS[task](0).stacks or sum(one.how.ranks for one in group) >= most:
                yield group
                group = []
        if group:
            yield group


def train_missing(arms: Iterable[Arm], path: Path) -> None:
    """Train the arms that a file of results lacks, and add them to it."""
    for group in groups(dict.fromkeys(arms).keys() - read(path).keys()):
        started_s = time.perf_counter()
        results = run(group)
        with path.open("a", encoding="utf-8") as file:
            for arm, result in zip(group, results, strict=True):
                file.write(json.dumps({**arm.facts, **asdict(result)}) + "\n")
        print(f"{len(group)} trainings: {time.perf_counter() - started_s:.0f} s", flush=True)


def main() -> None:
    """Train the arms of studies that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", nargs="+", default=[*STUDIES], choices=[*STUDIES])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    for study in arguments.study:
        print(study)
        train_missing(STUDIES[study], arguments.results)


if __name__ == "__main__":
    main()
