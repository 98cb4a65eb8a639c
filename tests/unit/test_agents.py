"""AGENTS.md and the skill are true: their commands run, and by them alone an agent chooses the same fleet twice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import TextContent
from ruamel.yaml import YAML

from tests.unit.optimizer.commands.conftest import Gpufleet, gpufleet
from tests.unit.optimizer.commands.test_up import Pulumi, pulumi
from tests.wheel import REPOSITORY

__all__ = ["gpufleet", "pulumi"]  # fixtures

AGENTS, SKILL = REPOSITORY / "AGENTS.md", REPOSITORY / "skills" / "gpufleet" / "SKILL.md"
REQUESTS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "workload": {"tokens": "500M", "seq_len": 8192}, "constraints": {"budget_usd": "2k"}},
    {"model": "resnet50", "workload": {"samples": "10M"}, "objective": "time", "constraints": {"gpus": ["A10G"]}},
    {"model": "7B", "workload": {"tokens": "100M", "seq_len": 2048, "method": "lora"}, "constraints": {"max_nodes": 1}},
]


def blocks(page: Path, language: str) -> list[str]:
    """The page's blocks of code, within lists too."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text.strip() for text in found]


def commands(page: Path) -> list[str]:
    return [line.strip() for block in blocks(page, "sh") for line in block.splitlines()]


def run(gpufleet: Gpufleet, line: str) -> str:
    """Run a line of a page as a shell would; return its standard output, which is a file's where the line says so."""
    words, _, file = line.partition(" > ")
    code, out, err = gpufleet(*shlex.split(words)[1:])
    assert code == 0, f"{line}: {err}"
    if file:
        Path(file).write_text(out, encoding="utf-8")
    return out


@pytest.mark.parametrize("page", [AGENTS, SKILL], ids=lambda page: page.name)
def test_every_command_runs_and_prints_json(
    page: Path, gpufleet: Gpufleet, pulumi: Pulumi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("request.yaml").write_text(json.dumps(REQUESTS[0]))
    assert len(commands(page)) >= 5
    for line in commands(page):
        out = run(gpufleet, line)
        assert out.rstrip().endswith("nothing was created") if "--dry-run" in line else json.loads(out), line
    assert not pulumi.ran("up")


def test_the_skill_has_the_front_matter_of_agent_skills() -> None:
    """https://agentskills.io/specification: the folder's name, and what the skill does and when."""
    _, front, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    matter = YAML(typ="safe").load(front)
    assert matter["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", matter["name"])
    assert 50 < len(matter["description"]) <= 1024 and "Use for" in matter["description"]
    assert len(body.splitlines()) < 500


def test_an_agent_chooses_the_same_fleet_by_shell_and_by_tool(
    gpufleet: Gpufleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests, with nothing but the page, the schemas and the tools' own description."""
    monkeypatch.chdir(tmp_path)
    lines = commands(AGENTS)
    schemas = {
        line.split()[-1]: Draft202012Validator(json.loads(run(gpufleet, line))) for line in lines if " schema " in line
    }
    (choose,) = [line for line in lines if " recommend " in line]
    by_shell = []
    for request in REQUESTS:
        schemas["request"].validate(request)
        Path("request.yaml").write_text(json.dumps(request))
        answer = json.loads(run(gpufleet, choose))
        schemas["answer"].validate(answer)
        by_shell.append(answer["plans"])

    (configuration,) = blocks(AGENTS, "json")
    server = json.loads(configuration)["mcpServers"]["gpufleet"]
    assert server == {"command": "gpufleet", "args": ["mcp"]}
    # The console script of this tree.
    code = ["-c", "import sys; sys.argv[0] = 'gpufleet'; from optimizer.start import main; main()"]
    parameters = StdioServerParameters(command=sys.executable, args=[*code, *server["args"]], env=dict(os.environ))

    async def ask() -> list[Any]:
        async with Client(parameters) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            answers = []
            for request in REQUESTS:
                arguments = {"request": request}
                Draft202012Validator(tools["recommend"].input_schema).validate(arguments)
                (text, *_) = (await client.call_tool("recommend", arguments)).content
                assert isinstance(text, TextContent)
                answers.append(json.loads(text.text)["plans"])
            return answers

    by_tool = asyncio.run(ask())
    assert by_tool == [plans[:3] for plans in by_shell] and all(by_tool)
    assert len({plans[0]["instance_type"] for plans in by_tool}) > 1, "the requests differ"
