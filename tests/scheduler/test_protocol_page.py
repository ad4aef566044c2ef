"""docs/protocol.md: its table of parameters has every field that a request can have, and no other."""

import re

from quire.v1 import generation_pb2 as wire
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "protocol.md"
GROUPS = {"sampling": wire.SamplingParams, "stopping": wire.StoppingParams, "output": wire.OutputParams}


def test_the_table_has_every_parameter_once() -> None:
    section = PAGE.read_text(encoding="utf-8").split("# The parameters of a request\n")[1].split("\n**")[0]
    told = [name for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for name in re.findall(r"\w+", cell)]
    fields = set(wire.GenerateRequest.DESCRIPTOR.fields_by_name) - set(GROUPS)
    for group in GROUPS.values():
        fields |= set(group.DESCRIPTOR.fields_by_name)
    assert sorted(told) == sorted(fields)
