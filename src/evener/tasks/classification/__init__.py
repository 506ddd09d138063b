"""Text classification with LoRA adapters: in threads of one process, or one process per device."""
