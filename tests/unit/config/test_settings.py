"""``DdpConfig``: every option is documented and checked, with value, cause and remedy."""

import dataclasses
import inspect
import math
import re

import numpy as np
import pytest

from evener import ConfigError, Ddp, DdpConfig
from evener.config.loading import load_config
from evener.config.runs import ClassifyRunConfig, RunConfig
from evener.managed.description import describe
from evener.planning.cadence import CadencePolicy
from evener.planning.guard import NoGuard
from evener.planning.report import Report

#: Options, and in which words the message names them, their value and what is allowed.
BAD = [
    ({"max_grad_norm": 0.0}, ["max_grad_norm is 0.0", "greater than 0"]),
    ({"max_grad_norm": math.nan}, ["max_grad_norm is nan", "finite"]),
    ({"max_grad_norm": np.True_}, ["max_grad_norm is np.True_", "number"]),
    ({"verify_every": np.True_}, ["verify_every is np.True_", "whole number"]),
    ({"non_finite": "ignore"}, ["non_finite is 'ignore'", "'raise' or 'skip'"]),
    ({"speed_hint": (1.0, 0.0)}, ["speed_hint is (1.0, 0.0)", "above 0 for each rank"]),
    ({"speed_hint": {1: 0}}, ["speed_hint is {1: 0}", "above 0"]),
    ({"speed_hint": (1, 2.3)}, ["speed_hint is (1, 2.3)", "with_speed_hint(1, 2.3)", "{1: 2.3}"]),
    ({"partition_ratios": (1, -1)}, ["partition_ratios.1 is -1", "than or equal to 0"]),
    (
        {"speed_hint": (2, 1), "partition_ratios": (1, 2)},
        ["speed_hint is (2.0, 1.0)", "partition_ratios (1.0, 2.0)", "give one of them"],
    ),
    ({"anchor": 3.0}, ["anchor is 3.0", "whole number"]),
    ({"gradient_buckets": [("head", [b"weight"])]}, ["gradient_buckets.0.1.0 is b'weight'"]),
    ({"anchor": 300}, ["anchor is 300", "max_anchor (200)", "raise max_anchor"]),
    ({"divergence_factor": 1.0}, ["divergence_factor is 1.0", "less than 1"]),
    ({"gradient_buckets": "all"}, ["gradient_buckets is 'all'", "Sequence"]),
    ({"gradient_buckets": [("head",)]}, ["gradient_buckets.0.1 is ('head',)", "required"]),
    ({"timeout_s": 0.0}, ["timeout_s is 0.0", "greater than 0"]),
    ({"emulate_slow": {1: 0.5}}, ["emulate_slow.1 is 0.5", "than or equal to 1"]),
    ({"anchr": 3}, ["anchr is 3", "unknown", "anchor, overhead_target, "]),
    ({"stop_when": True}, ["stop_when is True", "callable"]),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[str(o) for o, _ in BAD])
def test_bad_options_are_refused_at_once(options, words):
    with pytest.raises(ConfigError) as caught:
        DdpConfig(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"speed_hint": (1.0, 0.5, 0.5)},
            ["speed_hint is (1.0, 0.5, 0.5)", "2 ranks"],
        ),
        ({"partition_ratios": (1.0,)}, ["partition_ratios is (1.0,)", "2 ranks"]),
        (
            {"emulate_slow": {2: 3.0}},
            ["emulate_slow is {2: 3.0}", "2 ranks"],
        ),
        ({"speed_hint": {2: 3.0}}, ["speed_hint is {2: 3.0}", "2 ranks"]),
    ],
)
def test_options_that_do_not_fit_the_team_are_refused(options, words):
    config = DdpConfig(**options)
    with pytest.raises(ConfigError) as caught:
        config.check_team(2)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("diff", [0, 1])
def test_ranks_in_step_average_as_rarely_as_the_overhead_asks_for(diff):
    """The difference between ranks is bounded, not how fast both follow the anchor."""
    config = DdpConfig(max_batch_diff=diff, overhead_target=0.1)
    policy = CadencePolicy(["a", "b"], config.make_cadence(2), NoGuard(), max_batch_diff=diff)
    sync_s = 0.0
    for window in range(4):
        steps = policy.plan(window, 0, left=10**6, limit=None).steps
        assert max(steps) - min(steps) <= diff
        policy.observe(
            [
                Report(steps=n, samples=n, busy_s=n * ms / 1000)
                for n, ms in zip(steps, (10.0, 10.5), strict=True)
            ],
            sync_s,
        )
        sync_s = 0.1  # 10 steps take as long: a tenth of the time is about 100 steps
    assert min(steps) >= 50


def test_every_option_is_documented():
    text = "".join(inspect.cleandoc(c.__doc__ or "") for c in DdpConfig.__mro__ if c is not object)
    documented = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
    assert {field.name for field in dataclasses.fields(DdpConfig)} <= {*documented}


# ── one declaration, several front doors ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_grad_norm", -1), ("verify_every", -1), ("overhead_target", 0.9), ("timeout_s", 0)],
)
def test_every_front_door_refuses_with_the_same_words(option, value):
    with pytest.raises(ConfigError) as caught:
        DdpConfig(**{option: value})
    words = str(caught.value)
    assert words.startswith(f"{option} is {value}: ")
    with pytest.raises(ConfigError, match=re.escape(words)):
        Ddp.builder(print, print, print, **{option: value}).run()
    for schema in (RunConfig, ClassifyRunConfig):
        with pytest.raises(ConfigError, match=re.escape(words)):
            load_config(schema, None, [f"{option}={value}"])


@pytest.mark.parametrize("schema", [RunConfig, ClassifyRunConfig])
def test_a_run_hands_its_options_on(schema):
    keys = {"verify_every": 3, "max_grad_norm": 2.0, "anchor": 4, "speed_hint": [1.0, 2.0]}
    own = {"emulate_slow": {1: 2.0}, "stop_when": None, "quiet": True}
    config = load_config(schema, keys)
    assert config.ddp_config(**own) == DdpConfig(
        verify_every=3, max_grad_norm=2.0, speed_hint=[1.0, 2.0], **own
    )
    assert config.idle_options == ["anchor"]
    config = load_config(schema, keys, ["policy=async"])
    assert config.ddp_config(**own).anchor == 4
    assert config.idle_options == []
    assert load_config(schema, None).max_grad_norm == 1.0


def test_options_at_once_give_way_to_one_that_is_given_by_itself():
    functions = (lambda device: None, lambda params: None, lambda model, batch: None)
    at_once = DdpConfig(max_grad_norm=1.0, verify_every=5, stop_when=lambda: True)
    run = describe(
        *functions, dataset=[1], batch_size=1, num_epochs=1, config=at_once, max_grad_norm=2.0
    )
    assert (run.max_grad_norm, run.verify_every) == (2.0, 5)
    config = run.team_config(lambda: False)
    assert (config.max_grad_norm, config.verify_every) == (2.0, 5)
    assert config.stop_when is not None
    assert config.stop_when()
