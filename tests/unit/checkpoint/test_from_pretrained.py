from pathlib import Path

import pytest
import torch

from evener.checkpoint import Snapshot, copy_to_cpu, open_checkpoint, write_checkpoint


def test_model_file_loads_in_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    write_checkpoint(tmp_path, Snapshot(7, {"model": copy_to_cpu(model.state_dict())}, files))

    transformers.utils.logging.disable_progress_bar()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "step-7", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = torch.arange(10).view(1, 10)
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)

    aliases = open_checkpoint(tmp_path / "step-7").manifest.aliases["model"]
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    model.load_state_dict(open_checkpoint(tmp_path / "step-7").tensors("model"), strict=True)
