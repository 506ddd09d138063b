"""Two models and two optimizers, which take turns."""

import torch
from torch import nn
from torch.nn import functional as F

from evener import Ddp

torch.manual_seed(0)
real = torch.randn(256, 2) * 0.5 + 2
noise = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(real, noise)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
ddp = Ddp.setup([generator, discriminator], [opt_g, opt_d])
loader = ddp.loader(dataset, batch_size=64)
for epoch in range(3):
    for reals, z in loader.epoch(epoch):
        fakes = generator(z)
        loss_d = F.softplus(-discriminator(reals)) + F.softplus(discriminator(fakes.detach()))
        ddp.backward(loss_d.mean(), optimizer=opt_d)
        ddp.step(opt_d)
        loss_g = F.softplus(-discriminator(fakes)).mean()
        ddp.backward(loss_g, optimizer=opt_g)
        ddp.step(opt_g)
if ddp.is_main_process:
    state = {"g": generator.state_dict(), "d": discriminator.state_dict()}
    torch.save({f"{k}.{n}": t for k, part in state.items() for n, t in part.items()}, "model.pt")
