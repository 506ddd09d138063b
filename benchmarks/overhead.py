"""What evener costs on one rank: its loop against a plain PyTorch loop.

    python benchmarks/overhead.py --json overhead.json
    python benchmarks/overhead.py --quick

Both loops train copies of one model in one process on one thread: same samples a step, same fused
AdamW, with and without clipping. They take short turns, each going first in every other one.
``ratio`` is evener's time over that of the plain loop in the same round of several turns, and
``cpu_ratio`` the same in processor time.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from models import GPT, Tokens, mean_loss
from report import load_before, make_parser, ratios, some_of, spread, text_of, write_report
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator

NUM_SAMPLES = 50_000
TURNS_A_ROUND = 4
MAX_GRAD_NORM = 1.0

#: Width, layers, sequence length, samples of a step: from nearly all Python to nearly none.
CASES = {
    "0.1M": (64, 2, 64, 8),
    "0.8M": (128, 4, 128, 4),
    "3.3M": (256, 4, 128, 2),
    "10.8M": (384, 6, 128, 1),
}


def main() -> None:
    """Measure every case with and without clipping."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    before = load_before()
    rows = []
    for name in arguments.cases:
        rows += [measure(name, arguments, clip=clip) for clip in (False, True)]
        print(f"{name}: measured", flush=True)
    print(text_of(rows))
    write_report(arguments, before, rows, threads=1)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=1.2, help="length of a round")
    parser.add_argument("--cases", type=some_of(CASES), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--quick", action="store_true", help="3 rounds of the two small models")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.cases = 3, ["0.1M", "0.8M"]
    return arguments


def measure(name: str, arguments: argparse.Namespace, *, clip: bool) -> dict[str, object]:
    """Let both loops take turns; return the row."""
    *_, seq_len, batch_size = CASES[name]
    data = Tokens(NUM_SAMPLES, seq_len)
    model, optimizer = make_model(name)
    batches = plain_batches(data, batch_size)

    def plain(steps: int) -> None:
        for _ in range(steps):
            loss = mean_loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()

    own_model, own_optimizer = make_model(name)
    ddp = Ddp.setup(
        own_model,
        own_optimizer,
        devices="cpu",
        precision="fp32",
        config=DdpConfig(max_grad_norm=MAX_GRAD_NORM if clip else None, quiet=True),
        communicator=Communicator(),
    )
    own_batches = ddp.loader(data, batch_size=batch_size).epoch(0)

    def evener(steps: int) -> None:
        for _ in range(steps):
            ddp.backward(mean_loss(own_model, next(own_batches)))
            ddp.step()

    with closing(ddp):
        for loop in (plain, evener):  # caches, and state of optimizers that is made lazily
            timed(loop, 3)
        wall_s, _ = timed(plain, 3)
        steps = max(1, round(arguments.round_s / (2 * TURNS_A_ROUND) / (wall_s / 3)))
        rounds = [[[0.0, 0.0], [0.0, 0.0]] for _ in range(arguments.rounds)]
        for times in rounds:
            for turn in range(TURNS_A_ROUND):
                for which in (0, 1) if turn % 2 else (1, 0):
                    wall_s, cpu_s = timed((plain, evener)[which], steps)
                    times[which][0] += wall_s
                    times[which][1] += cpu_s
    of_plain, of_evener = zip(*rounds, strict=True)
    walls, cpus = (
        ratios([one[kind] for one in of_evener], [one[kind] for one in of_plain]) for kind in (0, 1)
    )
    return {
        "name": name,
        "clip": clip,
        "params": sum(p.numel() for p in model.parameters()),
        "batch_size": batch_size,
        **spread("plain_ms", [1000 * one[0] / steps / TURNS_A_ROUND for one in of_plain]),
        **spread("ratio", walls),
        **spread("cpu_ratio", cpus),
    }


def plain_batches(data: Tokens, batch_size: int) -> Iterator[Tensor]:
    """Yield batches of a plain loop."""
    order = torch.randperm(NUM_SAMPLES).tolist()
    for first in range(0, NUM_SAMPLES, batch_size):
        yield torch.stack([data[i] for i in order[first : first + batch_size]])


def timed(run: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Return seconds of wall and of processor time."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run(steps)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def make_model(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model for both loops."""
    torch.manual_seed(0)
    width, layers, seq_len, _ = CASES[name]
    model = GPT(width=width, layers=layers, seq_len=seq_len)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


if __name__ == "__main__":
    main()
