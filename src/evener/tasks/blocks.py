"""The parts of a transformer in which its gradients are exchanged."""

from torch import nn

#: Labels of parameters outside of blocks, in the order of exchange.
LM_HEAD, FINAL_NORM, EMBEDDING = "LM head", "final norm", "embedding"


def gradient_buckets(model: nn.Module) -> list[tuple[str, list[str]]] | None:
    """Return a bucket for each block, the last one first; then LM head, final norm, embedding.

    Backward finishes blocks in that order. The blocks are the ``ModuleList`` that holds most of
    the parameters; without one, the ``Sequential`` of modules of one class that does. An LM head
    that is tied to the embedding is in the embedding's bucket, whose gradient is finished last.

    Args:
        model: A causal language model.

    Returns:
        Labels with names of parameters, for ``DdpConfig.gradient_buckets``; ``None`` for a model
        without blocks.
    """
    blocks = _blocks(model)
    if blocks is None:
        return None
    labels = {id(p): f"block {n}" for n, block in enumerate(blocks) for p in block.parameters()}
    embedding = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    head = {id(p) for p in _output(model).parameters()}
    seen_block = False
    order = [f"block {n}" for n in reversed(range(len(blocks)))]
    buckets: dict[str, list[str]]
    buckets = {label: [] for label in (*order, LM_HEAD, FINAL_NORM, EMBEDDING)}
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in labels:
            seen_block = True
            buckets[labels[key]].append(name)
        elif key in embedding or (not seen_block and (parameter.dim() > 1 or "emb" in name)):
            buckets[EMBEDDING].append(name)
        elif key in head or parameter.dim() > 1:
            buckets[LM_HEAD].append(name)
        else:
            buckets[FINAL_NORM].append(name)
    return [(label, names) for label, names in buckets.items() if names]


def _blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    lists: list[nn.ModuleList | nn.Sequential]
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:  # a Sequential of different layers has no blocks
        rows = [m for m in model.modules() if isinstance(m, nn.Sequential)]
        lists = [m for m in rows if len(m) > 1 and len(set(map(type, m))) == 1]
    sizes = [sum(p.numel() for p in blocks.parameters()) for blocks in lists]
    # A list inside a block has no more parameters than the blocks, and comes after them.
    return lists[sizes.index(max(sizes))] if any(sizes) else None


def _output(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_output_embeddings", None)
    found = get() if callable(get) else None
    return found if isinstance(found, nn.Module) else nn.Module()
