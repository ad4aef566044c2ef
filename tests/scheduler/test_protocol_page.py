"""The table of parameters in docs/protocol.md has exactly the fields of a request."""

import re

from quire.v1 import generation_pb2 as pb
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "protocol.md"
GROUPS = {"sampling": pb.SamplingParams, "stopping": pb.StoppingParams, "output": pb.OutputParams}


def test_the_table_has_every_parameter_once() -> None:
    section = PAGE.read_text(encoding="utf-8").split("# The parameters of a request\n")[1].split("\n**")[0]
    listed = [
        name for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for name in re.findall(r"\w+", cell)
    ]
    fields = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - set(GROUPS)
    for group in GROUPS.values():
        fields |= set(group.DESCRIPTOR.fields_by_name)
    assert sorted(listed) == sorted(fields)
