"""Bodies whose form is wrong: compressed in another way than they say, or with too many levels."""

import gzip
import json

import pytest

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
