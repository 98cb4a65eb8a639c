"""``gpufleet mcp``, asked by the SDK's own client over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult, TextContent

from optimizer.commands.mcp import TOOLS, find_parameters, write_words
from optimizer.contract.errors import InvalidInputError
from tests.unit.optimizer.commands.conftest import Gpufleet

REQUEST = {"model": "llama-3.2-1b", "workload": {"tokens": "1B", "seq_len": 2048}}
ESTIMATE = {"model": "7B", "instance_type": "p4d.24xlarge", "seq_len": 2048, "micro_batch": 2, "compile": True}
# All that an agent can set. Whoever adds a parameter decides here whether it may reach it: nothing writes or spends.
REACHED = {
    *("request", "model", "tokens", "samples", "steps", "seq_len", "target_len", "global_batch", "precision"),
    *("optimizer", "method", "lora_rank", "lora_targets", "lora_alpha", "frozen", "framework", "compile"),
    *("parallelism", "sharding", "budget", "deadline", "region", "purchase", "spot_fallback"),
    *("instance_type", "gpu", "gpus", "max_nodes", "objective", "hour_usd", "calibration"),
    *("nodes", "micro_batch", "tensor", "pipeline", "context", "expert", "virtual_stages"),
    *("activation_checkpointing", "batch", "count", "memory", "cloud", "price", "against"),
    *("plan", "plan_number", "stack", "config", "directory", "since"),
}


def ask_server(session: Callable[[Client], Awaitable[None]]) -> None:
    """Run ``session`` with a client of a server that sees this test's environment."""

    async def run() -> None:
        code = "from optimizer.start import main; main()"
        server = StdioServerParameters(command=sys.executable, args=["-c", code, "mcp"], env=dict(os.environ))
        async with Client(server) as client:
            await session(client)

    asyncio.run(run())


def read(result: CallToolResult, at: int = 0) -> Any:
    """The JSON of a part of a tool's answer."""
    part = result.content[at]
    assert isinstance(part, TextContent)
    return json.loads(part.text)


def test_tools_answer_as_their_commands(gpufleet: Gpufleet, tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        return json.loads(gpufleet(*words, "--format", "json")[1])

    path = tmp_path / "request.yaml"
    path.write_text(json.dumps(REQUEST))
    answer = command("recommend", str(path), "--budget", "500")
    (tmp_path / "plan.json").write_text(json.dumps(answer["plans"][1]))
    # Pulumi's own event loop cannot run within the session's.
    previewed = command("preview", str(tmp_path / "plan.json"))

    async def session(client: Client) -> None:
        tools = (await client.list_tools()).tools
        assert tuple(tool.name for tool in tools) == TOOLS
        for tool in tools:
            Draft202012Validator.check_schema(tool.input_schema)
            assert tool.annotations and tool.annotations.read_only_hint and tool.description
        for request in (str(path), REQUEST):
            got = read(await client.call_tool("recommend", {"request": request, "budget": 500}))
            assert [got[key] for key in ("request", "rejected")] == [answer[key] for key in ("request", "rejected")]
            assert got["plans"] == answer["plans"][:3] and "candidates" not in got
        got = read(await client.call_tool("estimate", ESTIMATE))
        flags = "--model 7B --instance-type p4d.24xlarge --seq-len 2048 --micro-batch 2 --compile"
        assert got == command("estimate", *flags.split())
        got = read(await client.call_tool("offers", {"gpu": ["H100", "A100"], "region": ["us-*"]}))
        assert got == command("offers", "--gpu", "H100", "--gpu", "A100", "--region", "us-*") and got
        got = read(await client.call_tool("preview", {"plan": answer["plans"][1]}))
        assert got == previewed

    ask_server(session)


def test_a_failure_is_a_tool_error_with_the_commands_own_words(tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, Any], int, str]] = [
        ("offers", {"gpu": "H999"}, 2, "GPU 'H999' is not in the catalog"),
        ("offers", {"gpus": "H100"}, 2, "offers takes no gpus"),
        ("recommend", {"request": "--save=answer.json"}, 2, "--save=answer.json cannot be read"),
        ("recommend", {"model": "7B", "save": "answer.json"}, 2, "recommend takes no save"),
        ("recommend", {"model": "os:getcwd", "tokens": "1B"}, 2, "os:getcwd is a function"),
        ("recommend", {"request": REQUEST | {"model": "os:getcwd"}}, 2, "os:getcwd is a function"),
        ("estimate", ESTIMATE | {"model": "os:getcwd "}, 2, "os:getcwd is a function"),
        ("estimate", ESTIMATE | {"model": ["7B"]}, 2, 'model is ["7B"]'),
        ("estimate", ESTIMATE | {"compile": "false"}, 2, 'compile is "false"'),
        ("estimate", ESTIMATE | {"model": "7B\0"}, 2, "embedded null byte"),
        ("estimate", ESTIMATE | {"model": "7B" * 100_000}, 2, "Argument list too long"),
        ("status", {"stack": "missing"}, 2, "missing"),
        ("down", {"yes": True}, 2, "there is no tool down"),
    ]

    async def session(client: Client) -> None:
        os.mkfifo(tmp_path / "nobody-writes")
        waits = asyncio.create_task(client.call_tool("recommend", {"request": str(tmp_path / "nobody-writes")}))
        await asyncio.sleep(0)
        for tool, arguments, code, says in calls:
            result = await client.call_tool(tool, arguments)
            error = read(result)["error"]
            assert result.is_error and error["code"] == code and says in error["message"], error
        result = await client.call_tool("recommend", {"request": REQUEST, "budget": 1})
        assert result.is_error and read(result)["error"]["code"] == 3 and read(result, 1)["rejected"]
        assert not waits.done(), "a call that waits holds up no other"
        waits.cancel()

    ask_server(session)


def test_nothing_that_writes_or_spends_is_reached(tmp_path: Path) -> None:
    found = {name for tool in TOOLS for name in find_parameters(tool)}
    assert found <= REACHED
    for tool in TOOLS:
        for name, parameter in find_parameters(tool).items():
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                words = write_words(tool, {name: "--yes"}, tmp_path)
                assert words[1].endswith("=--yes") and words[2] == "--format=json", "a value is never an option"
    with pytest.raises(InvalidInputError):
        write_words("estimate", {"model": {"layers": 2}}, tmp_path)


def test_without_the_package_the_error_names_the_extra(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    code, out, err = gpufleet("mcp")
    assert (code, out) == (1, "") and "next: pip install 'gpufleet[mcp]'" in err
