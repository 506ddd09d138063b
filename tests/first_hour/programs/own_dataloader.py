"""A DataLoader of their own, with a collate function and worker processes."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from evener import Ddp


class Words(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 9, (150,), generator=generator).tolist()
        self.words = [torch.randint(1, 12, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        word = self.words[index]
        return word, float(word.float().mean())


def pad(samples):
    words, labels = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(labels)[:, None]


torch.manual_seed(0)
model = nn.Sequential(nn.EmbeddingBag(12, 8, padding_idx=0), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_loader = DataLoader(Words(), batch_size=25, shuffle=True, collate_fn=pad, num_workers=2)

ddp = Ddp.setup(model, optimizer)
train_loader = ddp.loader(train_loader)
for epoch in range(2):
    for words, labels in train_loader:
        loss = nn.functional.mse_loss(model(words), labels)
        ddp.backward(loss)
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"{len(train_loader)} steps in an epoch of {len(train_loader.dataset)} words")
