"""What recording a window costs on the main process: CPU time and bytes of ``events.jsonl``.

    python benchmarks/event_cost.py --ranks 1,2,4,8 --json event_cost.json

``cpu_us`` is the CPU time of the process for a window, median over bursts of windows: making the
event, handing it over, and the thread that encodes and writes it. It includes what notes the spans
of a window. ``_90`` is the 5th and 95th percentile. The windows are made up, with times and losses
of as many digits as real ones; nothing is trained.
"""

import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import load_before, write_report
from options import make_parser, numbers
from tables import spread, text_of
from torch import nn

from evener import Ddp
from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.engine.results import Progress, RankRecord, WindowResult
from evener.observe.jsonl import JsonlSink

#: Windows that are emitted at once; the writer's queue takes more.
BURST = 100


def main() -> None:
    """Measures what was asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    before = load_before()
    rows = [measure(arguments.windows, ranks) for ranks in arguments.ranks]
    write_report(arguments, before, rows)
    print(text_of(rows))


def measure(windows: int, ranks: int) -> dict[str, Any]:
    """One team, of which the main rank records windows."""
    team, found = ThreadTeam(ranks), dict[str, Any]()
    threads = [
        threading.Thread(target=be_rank, args=(team.communicator(rank), windows, found))
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def be_rank(comm: Communicator, windows: int, found: dict[str, Any]) -> None:
    """One rank of the team; the main one measures, while the others wait for it."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = Ddp.setup(model, optimizer, devices="cpu", communicator=comm, quiet=True)
    if comm.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            found |= record(ddp, Path(folder) / "events.jsonl", windows)
    comm.barrier(what="the measurement", timeout_s=600.0)
    ddp.close()


def record(ddp: Ddp, path: Path, windows: int) -> dict[str, Any]:
    """Records windows, and tells what each took."""
    draws = random.Random(0)
    sink, spans = JsonlSink(path), ddp.assembly.engine.spans
    ddp.events.report_to([sink])
    results = [result(number, ddp.world_size, draws) for number in range(windows)]
    bursts_us = []
    for first in range(0, windows, BURST):
        began_s = time.process_time()
        burst = results[first : first + BURST]
        for one in burst:
            spans.receive(time.perf_counter())
            spans.begin_wait()
            spans.begin_sync()
            spans.apply()
            ddp.events.window(one)
        for written in sink.pending():
            written.wait()
        bursts_us.append(1e6 * (time.process_time() - began_s) / len(burst))
    sink.close()
    size = path.stat().st_size / windows
    return {"ranks": ddp.world_size, **spread("cpu_us", bursts_us), "bytes": size}


def result(number: int, ranks: int, draws: random.Random) -> WindowResult:
    """A window in the middle of a run."""
    shares = [511 - rank for rank in range(ranks)]  # as they stay, there is no event of a plan
    records = tuple(
        RankRecord(
            samples=samples,
            weight=1024.0 * samples,
            loss_sum=1024.0 * samples * draws.uniform(2, 3),
            micro_batches=8,
            compute_s=draws.uniform(0.2, 0.3),
            update_s=draws.uniform(0.01, 0.02),
            wait_s=draws.uniform(0.01, 0.02),
            sync_s=draws.uniform(0.01, 0.02),
            elapsed_s=draws.uniform(0.3, 0.4),
            data_s=draws.uniform(0.001, 0.002),
            sent_bytes=123_456_789,
            work_ago_s=draws.uniform(0.2, 0.3),
            wait_ago_s=draws.uniform(0.02, 0.03),
            sync_ago_s=draws.uniform(0.01, 0.02),
        )
        for samples in shares
    )
    return WindowResult(
        window=number,
        epoch=3,
        start=51_200_000,
        size=sum(shares),
        loss=draws.uniform(2, 3),
        weight=1024.0 * sum(shares),
        grad_norm=draws.uniform(0, 1),
        lr=draws.uniform(1e-4, 1e-3),
        skipped=False,
        progress=Progress(window=number + 1),
        applied_t=time.time() + draws.random(),
        ranks=records,
    )


if __name__ == "__main__":
    main()
