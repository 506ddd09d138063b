"""How bytes move between ranks; the only place that touches ``torch.distributed``."""
