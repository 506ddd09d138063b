"""``Ddp``: the three ways to train, behind one name."""

from evener.loop.loop import Loop
from evener.managed.builder import DdpBuilder
from evener.manual import wrap


class Ddp(Loop):
    """A rank of the team: ``setup`` for your own loop, ``builder`` for evener's, ``wrap`` by hand.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Ranks in the team.
        device: This rank's torch device.
        devices: Every rank's device, such as ``("cuda:0", "cpu")``.
        members: The team, in rank order.
        precision: ``fp32``, ``bf16`` or ``fp16``, as resolved for this device.
    """

    wrap = staticmethod(wrap)
    #: ``Ddp.builder(model_fn, optim_fn, train_fn)``: evener owns the loop; see ``DdpBuilder``.
    builder = DdpBuilder
