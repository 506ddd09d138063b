"""A slow cable: a rank is parked if what backward does not hide costs more than it brings."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

from helpers.launched import Sandbox
from helpers.limits import PATIENCE_S
from helpers.machines import ADDRESSES, Machines

#: Layers that sleep: 2.1 million numbers, which take 0.35 s over 200 Mbit/s.
TRAIN = """
import json, sys, time, torch
from evener import Ddp, DdpConfig, Sink

LAYERS, WIDTH, BATCH = 8, 512, 8
SECONDS = float(sys.argv[1]) / LAYERS / (BATCH // 2)

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS / 3 * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SECONDS * 2 / 3 * len(grad))
        return grad

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = Sleep.apply(torch.tanh(layer(x)))
        return x

class Windows(Sink):
    taken = []

    def emit(self, event):
        if event["type"] == "window":
            self.taken.append((len(event["parked"]), max(r["elapsed_s"] for r in event["ranks"])))

    def close(self):
        pass

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
config = DdpConfig(overlap="on", sharded_update="off", quiet=True)
with Ddp.setup(model, optimizer, devices="cpu", sinks=[Windows()], config=config) as ddp:
    data = torch.ones(60 * BATCH, WIDTH)
    for x in ddp.loader(data, batch_size=BATCH, micro_batch_size=BATCH // 2).epoch(0):
        ddp.backward(model(x).square().mean())
        ddp.step()
if RANK == 0:
    print(json.dumps(Windows.taken))
"""


@pytest.mark.root
@pytest.mark.parametrize(("micro_batch_s", "num_parked"), [(0.3, 0), (0.03, 1)])
def test_whether_a_rank_pays_is_judged_by_what_backward_does_not_hide(
    tmp_path: Path, micro_batch_s: float, num_parked: int
) -> None:
    """Alone a rank takes two micro-batches for a window; with the whole exchange that is less."""
    with ExitStack() as stack:
        machines = stack.enter_context(Machines(rate="200mbit"))
        running = []
        for node in range(2):
            (folder := tmp_path / f"machine-{node}").mkdir()
            sandbox = Sandbox(folder)
            stack.callback(sandbox.close)
            sandbox.environ |= {
                "OMP_NUM_THREADS": "1",
                "EVENER_TOKEN_FILE": str(sandbox.token_file("a token that both machines know")),
            }
            nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", ADDRESSES[0])
            words = ("launch", *nodes, "--nproc", 1, sandbox.script(TRAIN), micro_batch_s)
            command = machines.command(node, sys.executable, "-P", "-m", "evener", *words)
            running.append(sandbox.start(*command))
        first, second = [each.end(PATIENCE_S) for each in running]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    parked, seconds = zip(*json.loads(first.out), strict=True)
    assert set(parked[-10:-1]) == {num_parked}
    if not num_parked:
        assert median(seconds[-10:]) < 2 * micro_batch_s, "slower than a rank alone"
