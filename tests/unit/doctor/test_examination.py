"""This host, whatever it is like."""

import json
from dataclasses import asdict

from pydantic import TypeAdapter

from evener.doctor.examination import examine_host
from evener.doctor.host_facts import HostFacts
from evener.doctor.judgement import judge_host
from evener.version import __version__


def test_facts_are_whole_and_survive_json() -> None:
    facts = examine_host()
    assert facts.devices[0].name == "cpu"
    assert facts.devices[0].failure == ""
    assert facts.versions["evener"] == __version__
    assert facts.exchange.gloo_failure == ""
    assert 1 <= facts.usable_cores <= facts.cores
    assert 0 < facts.free_bytes <= facts.memory_bytes
    text = json.dumps(asdict(facts))
    assert TypeAdapter(HostFacts).validate_json(text, strict=True) == facts
    judge_host(facts)
