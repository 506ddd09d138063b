"""A managed run whose workers are replaced: some are killed, and the others do it to the end."""

import os
import signal

import torch
from torch import nn

from evener.observe.events import Event, Sink
from helpers.managed import SAMPLES, assert_same, describe_job, make_model, train_plainly


class Kept(Sink):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def emit(self, event: Event) -> None:
        self.kinds.append(event["type"])

    def close(self) -> None:
        pass


def test_workers_that_are_killed_cost_nothing_of_the_result() -> None:
    """The main worker dies as an epoch begins, and the next one when it is to send the model."""

    def die(epoch: int, _: nn.Module) -> None:
        if epoch == 1 and os.environ["EVENER_MEMBER"].endswith("/0"):
            os.kill(os.getpid(), signal.SIGKILL)

    def make_mortal(device: torch.device) -> nn.Module:
        def die_instead_of_sending(*_: object) -> None:
            if os.environ["EVENER_MEMBER"].endswith("/1"):
                os.kill(os.getpid(), signal.SIGKILL)

        model = make_model(device)
        model.register_state_dict_pre_hook(die_instead_of_sending)
        return model

    events = Kept()
    run = describe_job(model_fn=make_mortal, epoch_fn=die, sinks=[events], elastic=(2, 2)).run()
    metrics = list(run.metrics())
    model, losses = train_plainly(6)
    assert_same(run.join().state_dict(), model)
    assert [(m.epoch, m.complete, m.samples) for m in metrics] == [(0, True, 46), (1, True, 46)]
    for m in metrics:
        expected = sum(n * x for n, x in zip([16, 16, 14], losses[3 * m.epoch :], strict=False))
        assert abs(m.scalars["loss"] - expected / SAMPLES) < 1e-9
        assert m._repr_html_()
    assert events.kinds[0] == "run_started"
    assert "worker_lost" in events.kinds
    assert events.kinds[-1] == "run_finished"
