"""Bodies whose form is wrong: compressed in another way than they say, or with too many levels."""

import gzip
import json

import pytest

from gateway.api.fields import MAX_ITEMS
from tests.support.gateway.rig import CHAT, Rig


async def test_a_body_that_is_not_compressed_as_it_says(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = json.dumps(CHAT).encode()
    async with Rig() as rig:
        for data, status in ((gzip.compress(body), 200), (body, 400), (b"\x1f\x8b nonsense", 400)):
            async with rig.http.post("/v1/chat/completions", data=data, headers=headers) as response:
                assert response.status == status, await response.text()
                if status == 400:
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not [each for each in caplog.records if each.name.startswith(("gateway", "aiohttp")) and each.exc_info]


@pytest.mark.parametrize(
    ("encodings", "status"), [(["identity"], 200), (["foo"], 415), (["gzip, gzip"], 415), (["foo", "identity"], 415)]
)
async def test_a_body_in_an_unknown_encoding_is_refused(encodings: list[str], status: int) -> None:
    headers = [("Content-Type", "application/json"), *(("Content-Encoding", each) for each in encodings)]
    async with Rig() as rig:
        async with rig.http.post("/v1/chat/completions", data=json.dumps(CHAT), headers=headers) as response:
            body = await response.json()
    assert response.status == status
    assert status == 200 or "Content-Encoding" in body["error"]["message"]


MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
DEEP_BODIES = {
    "/v1/chat/completions": f'{MESSAGES},"chat_template_kwargs":%s',
    "/v1/completions": '"prompt":"hi","metadata":%s',
    "/v1/messages": f'{MESSAGES},"max_tokens":5,"tools":[{{"name":"f","input_schema":%s}}]',
    "/v1/responses": '"input":"hi","tools":[{"type":"function","name":"f","parameters":%s}]',
}


@pytest.mark.parametrize("path", DEEP_BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_levels_of_a_body_are_bounded(path: str, is_streamed: bool) -> None:
    """Python's own bound depends on the stack: values that it could read were too deep for what came after."""
    body = "{" + DEEP_BODIES[path] + f',"stream":{json.dumps(is_streamed)}}}'
    async with Rig(tool_format="hermes") as rig:
        for num_levels, status in ((90, 200), (101, 400), (900, 400), (974, 400), (5000, 400)):
            data = body % ('{"a":' * num_levels + "1" + "}" * num_levels)
            async with rig.http.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
                text = await response.text()
                assert response.status == status, text
                assert num_levels > 900 or status == 200 or "at most 100 levels" in text
        data = json.dumps(CHAT | {"messages": [{"role": "user", "content": "[" * 200}]})
        headers = {"Content-Type": "application/json"}
        async with rig.http.post("/v1/chat/completions", data=data, headers=headers) as response:
            assert response.status == 200  # brackets within a text are no levels


MANY = MAX_ITEMS + 1
LONG = {
    "stop": {"stop": ["a"] * MANY},
    "messages[0].content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]},
    "messages[0].tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
    "messages[1].content": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MANY // 2)}] * 3
    },
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(1025)}},
}


@pytest.mark.parametrize("field", LONG)
async def test_long_lists_are_refused_before_their_items_are_looked_at(field: str) -> None:
    async with Rig() as rig:
        async with rig.http.post("/v1/chat/completions", json=CHAT | LONG[field]) as response:
            error = (await response.json())["error"]
        assert response.status == 400
        assert error["param"] == field
        assert "at most" in error["message"]
