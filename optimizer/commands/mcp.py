"""``gpufleet mcp``: the commands that only read, as tools of a Model Context Protocol server on standard input."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from optimizer.commands.options import OutputFile
from optimizer.commands.output import describe_error
from optimizer.contract.errors import GpufleetError, InvalidInputError

TOOLS = ("recommend", "estimate", "offers", "what-if", "preview", "preflight", "status", "costs")
# Parameters that write, call what could write, have no end, or choose the form. A type says which are files to write.
_LEFT_OUT = {"refresh", "dry_run_calls", "watch_s", "output_format", "explain", "show_all"}
# An answer of recommend is far longer than a conversation can hold.
_MOST_PLANS = 3
# A model may be a function of the user's code, which may do anything: in a tool's process none runs.
_START = (
    "from optimizer.workload.profile import profiler; profiler.RUNS_FUNCTIONS = False; "
    "from optimizer.start import main; main()"
)
INSTRUCTIONS = (
    "gpufleet chooses a GPU fleet on AWS for a training, within a budget and a deadline. Every tool is a command of "
    "that name with --format json, and only reads: none creates or ends anything. costs asks Cost Explorer, which "
    "bills 0.01 USD a request. An error has exit code, value, limit and the next command."
)


def find_parameters(tool: str) -> dict[str, click.Parameter]:
    """Return what a tool takes, by its command's own words (``gpu`` for --gpu), but for those that write or wait."""
    parameters: dict[str, click.Parameter] = {}
    for parameter in _import_command(tool).params:
        if parameter.expose_value and parameter.name not in _LEFT_OUT and not isinstance(parameter.type, OutputFile):
            word = parameter.opts[0].lstrip("-").replace("-", "_").removesuffix("_file")
            parameters[str(parameter.name) if word in parameters else word] = parameter  # --plan beside PLAN
    return parameters


def _import_command(tool: str) -> click.Command:
    command: click.Command = importlib.import_module(f"optimizer.commands.{tool.replace('-', '_')}").command
    return command


def describe_tool(tool: str) -> dict[str, Any]:
    """Return description and JSON Schema of a tool, from its command."""
    parameters = find_parameters(tool)
    text = inspect.cleandoc(_import_command(tool).help or "")
    if tool == "recommend":
        text += f"\n\nHas the best {_MOST_PLANS} plans; the command has all, pareto and candidates."
    return {
        "name": tool,
        "description": text,
        "input_schema": {
            "type": "object",
            "properties": {name: _describe(parameter) for name, parameter in parameters.items()},
            "required": [name for name, parameter in parameters.items() if parameter.required],
            "additionalProperties": False,
        },
    }


def _describe(parameter: click.Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": ["string", "number"]}
    if isinstance(parameter, click.Argument):
        schema = {"type": ["string", "object"], "description": "The document, or the path of its file."}
    elif isinstance(parameter, click.Option):
        if parameter.is_flag:
            schema = {"type": "boolean"}
        elif isinstance(parameter.type, click.Choice):
            schema = {"enum": list(parameter.type.choices)}
        if parameter.multiple:
            schema = {"type": "array", "items": schema}
        schema["description"] = parameter.help or ""
    return schema


def write_words(tool: str, arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the words of the command line; a document becomes a file in ``folder``.

    Raises:
        InvalidInputError: an argument is unknown, or of another kind than its schema has.
    """
    parameters = find_parameters(tool)
    options: list[str] = []
    positional: list[str] = []
    for name, value in arguments.items():
        if name not in parameters:
            raise InvalidInputError(f"{tool} takes no {name}", limit=", ".join(parameters))
        parameter = parameters[name]
        is_flag = isinstance(parameter, click.Option) and parameter.is_flag
        if isinstance(parameter, click.Argument) and isinstance(value, Mapping):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(value), encoding="utf-8")
            value = str(path)
        items = value if isinstance(value, list) and parameter.multiple else [value]
        if not all(isinstance(item, bool if is_flag else str | float | int) for item in items):
            limit = "true or false" if is_flag else "a text or a number"
            raise InvalidInputError(f"{name} is {json.dumps(value)}", limit=limit)
        if isinstance(parameter, click.Argument):
            positional.append(str(value))
        elif is_flag:
            options += [parameter.opts[0]] if value else []
        else:
            options += [f"{parameter.opts[0]}={item}" for item in items]
    return [tool, *options, "--format=json", "--", *positional]


async def call(tool: str, arguments: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Run a tool's command in a process of its own; return the texts of its answer, and whether it failed."""
    try:
        if tool not in TOOLS:
            raise InvalidInputError(f"there is no tool {tool}", limit=", ".join(TOOLS))
        with TemporaryDirectory() as folder:
            try:
                words = write_words(tool, arguments, Path(folder))
            except ModuleNotFoundError:  # the command names the extra that it needs
                words = [tool, "--format=json"]
            pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            # Standard input has the protocol's messages. -P: no module of the current folder is imported by chance.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _START, *words, stdin=null, stdout=pipe, stderr=pipe
            )
            try:
                out, err = (stream.decode(errors="replace").strip() for stream in await process.communicate())
            finally:
                if process.returncode is None:  # the call was cancelled
                    process.kill()
    except (GpufleetError, OSError, ValueError) as error:  # also text that no command line can hold
        refused = error if isinstance(error, GpufleetError) else InvalidInputError(str(error))
        return [json.dumps({"error": describe_error(refused)})], True
    if tool == "recommend" and out:
        answer = json.loads(out)
        answer = {key: answer[key] for key in answer if key not in ("pareto", "candidates")}
        out = json.dumps(answer | {"plans": answer["plans"][:_MOST_PLANS]})
    if process.returncode:
        return [text for text in (err.splitlines()[-1] if err else "", out) if text], True
    return [text for text in (out, err) if text], False


@click.command(
    epilog="""\b
Example:
  gpufleet mcp
  claude mcp add gpufleet -- gpufleet mcp
"""
)
def command() -> None:
    """Serve the commands that only read to an agent, by the Model Context Protocol over standard input and output.

    The tools are recommend, estimate, offers, what-if, preview, preflight, status and costs. Needs the package mcp
    (pip install 'gpufleet[mcp]').
    """
    from mcp import server, stdio_server, types

    async def list_tools(_: object, __: object) -> types.ListToolsResult:
        tools, reads = [], types.ToolAnnotations(read_only_hint=True)
        for name in TOOLS:
            with suppress(ModuleNotFoundError):  # preview and preflight need an extra
                tools.append(types.Tool(**describe_tool(name), annotations=reads))
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: object, given: types.CallToolRequestParams) -> types.CallToolResult:
        texts, is_error = await call(given.name, given.arguments or {})
        content: list[types.ContentBlock] = [types.TextContent(text=text) for text in texts]
        return types.CallToolResult(content=content, is_error=is_error)

    async def serve() -> None:
        tools = server.Server("gpufleet", instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool)
        async with stdio_server() as (reading, writing):
            await tools.run(reading, writing, tools.create_initialization_options())

    asyncio.run(serve())
