"""The jobs that evener provides; besides ``hf.py``, the only users of Hugging Face's libraries.

transformers, tokenizers and peft are imported inside functions: they are an optional extra, and
slow to import.
"""
