"""A GAN of two perceptrons, the generator's turn first, as public scripts for MNIST have it.

The noise of a sample comes with the sample. Drawn in the loop it would depend on how many samples a
rank has, and so on the team.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from evener import Ddp

LATENT, SIDE = 8, 6


class Stripes(Dataset):
    """Images of one bright stripe, each with noise for the generator."""

    def __init__(self, num_samples: int) -> None:
        draws = torch.Generator().manual_seed(1)
        self.images = torch.full((num_samples, 1, SIDE, SIDE), -1.0)
        for image in self.images:
            image[0, int(torch.randint(SIDE, (), generator=draws))] = 1.0
        self.noise = torch.randn(num_samples, LATENT, generator=draws)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.noise[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", required=True)
    opt = parser.parse_args()

    torch.set_default_dtype(torch.float64)  # so that sums in another order leave no trace
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, SIDE * SIDE), nn.Tanh()
    )
    discriminator = nn.Sequential(
        nn.Linear(SIDE * SIDE, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid()
    )
    adversarial_loss = nn.BCELoss()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    dataloader = DataLoader(Stripes(203), batch_size=opt.batch_size, shuffle=True)

    ddp = Ddp.setup([generator, discriminator], [optimizer_g, optimizer_d])
    dataloader = ddp.loader(dataloader)
    seen = first = turns = 0
    for epoch in range(opt.n_epochs):
        for i, (imgs, z) in enumerate(dataloader.epoch(epoch)):
            imgs, z = imgs.to(ddp.device), z.to(ddp.device)
            valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
            valid, fake = valid.to(ddp.device), fake.to(ddp.device)
            first += i == 0
            seen += len(imgs)
            # Train the generator.
            gen_imgs = generator(z)
            g_loss = adversarial_loss(discriminator(gen_imgs), valid)
            ddp.backward(g_loss, optimizer=optimizer_g)
            turns += ddp.step(optimizer_g) is not None
            # Train the discriminator.
            real_loss = adversarial_loss(discriminator(imgs.flatten(1)), valid)
            fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
            ddp.backward((real_loss + fake_loss) / 2, optimizer=optimizer_d)
            turns += ddp.step(optimizer_d) is not None
    result = {
        "samples": seen,
        "first batches": first,
        "progress": ddp.progress.samples,
        "parameters": nn.utils.parameters_to_vector(
            [*generator.parameters(), *discriminator.parameters()]
        ).detach(),
    }
    torch.save(result, f"{opt.out}/rank-{ddp.rank}.pt")
    ddp.close()


if __name__ == "__main__":
    main()
