"""Configurations of pretraining runs, as ``evener pretrain`` reads them."""

from functools import partial

from evener.config.loading import load_config
from evener.config.runs import RunConfig

#: ``load_run_config(file_or_keys, overrides)``.
load_run_config = partial(load_config, RunConfig)
