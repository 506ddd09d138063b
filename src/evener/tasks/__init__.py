"""The jobs that evener does out of the box, and the only place that knows Hugging Face's libraries.

transformers, tokenizers and peft are imported inside functions: they are an optional extra, and
slow to import.
"""
