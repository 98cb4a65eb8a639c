"""``gpufleet doctor``: what is installed, how old the data is, and the command that makes each part newer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import click
from botocore.session import Session

from optimizer.aws import errors
from optimizer.catalog import load, ttl
from optimizer.commands.output import format_option, write_rows
from optimizer.commands.pulumi_engine import INSTALL_PAGE
from optimizer.contract.errors import GpufleetError
from optimizer.performance import calibration

COLUMNS = {
    "part": "part",
    "found": "found",
    "age_days": "age, days",
    "good_for_days": "good for, days",
    "state": "state",
    "next": "next",
}
# Commands that make facts newer; each version of gpufleet brings all of them.
_REFRESH, _NEW_VERSION = "gpufleet catalog refresh", "install a newer gpufleet"
_NEXT = {
    **dict.fromkeys(("instance types", "zones", "on-demand prices", "reserved prices", "unit prices"), _REFRESH),
    "spot prices": _REFRESH,
    "interruption bands": "gpufleet catalog learn STACK: your own stacks' interruptions go before them",
    "capacity events": "gpufleet catalog learn STACK",
    "Capacity Block rates": "gpufleet blocks find PLAN: AWS's offers of now",
}
# Looking for these credentials sends a request, or runs a program.
_ASKING_PROVIDERS = ("assume-role", "container-role", "iam-role", "custom-process")


@click.command(
    epilog="""\b
Example:
  gpufleet doctor
  gpufleet doctor --format json
"""
)
@format_option
def command(output_format: str) -> None:
    """Show what is installed, how old each kind of data is, and what makes it newer.

    State is ok, old (older than the data is good for) or missing. Nothing is sent.
    """
    shipped = calibration.load()
    runs = _row(
        "calibration",
        f"{shipped.rows} measured runs, {shipped.as_of}",
        "gpufleet calibrate RUNS.csv --out FILE: your own runs",
        age_days=ttl.age_days(shipped.as_of),
    )
    rows = [*_list_installed(), *_list_data(), runs, _describe_credentials()]
    write_rows(rows, COLUMNS, output_format, spare=("good_for_days",))


def _row(part: str, found: str, next_step: str = "", *, state: str = "", **ages: int | None) -> dict[str, Any]:
    return {"part": part, "found": found, "state": state or ("ok" if found else "missing"), "next": next_step, **ages}


def _list_installed() -> Iterator[dict[str, Any]]:
    """List Python, gpufleet, its packages, those of each extra, and the Pulumi CLI."""
    yield _row("Python", platform.python_version())
    yield _row("gpufleet", metadata.version("gpufleet"))
    needed: dict[str, list[str]] = {"": []}
    for requirement in metadata.requires("gpufleet") or []:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)", requirement)
        if name and (extra is None or extra[1] != "dev"):
            needed.setdefault(extra[1] if extra else "", []).append(name[0])
    for extra_name, packages in needed.items():
        versions = {name: _find_version(name) for name in packages}
        install = f"pip install 'gpufleet{f'[{extra_name}]' if extra_name else ''}'"
        found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
        is_whole = all(versions.values())
        part = f"packages of [{extra_name}]" if extra_name else "packages"
        yield _row(part, found, "" if is_whole else install, state="ok" if is_whole else "missing")
    found = ""
    if program := shutil.which("pulumi"):
        quiet = {**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "true"}
        done = subprocess.run([program, "version"], capture_output=True, text=True, check=False, env=quiet)
        found = done.stdout.strip() or done.stderr.strip()
    yield _row("Pulumi CLI", found, "" if found else f"up, down and move need it: {INSTALL_PAGE}")


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _list_data() -> Iterator[dict[str, Any]]:
    """List each kind of the catalog's data by its oldest source; kinds that do not age are left out."""
    try:
        catalog = load()
    except GpufleetError as error:
        yield _row("catalog", error.got, error.next_step, state="missing")
        return
    for name in dict.fromkeys(source.name for source in catalog.sources):
        sources = [source for source in catalog.sources if source.name == name]
        oldest = min(sources, key=lambda source: source.as_of)
        limit = ttl.source_ttl_days(name, oldest.origin)
        if limit is None:
            continue
        dates = f"{oldest.as_of} to {max(source.newest for source in sources)}"
        age, state = ttl.age_days(oldest.as_of), "old" if any(map(ttl.is_old, sources)) else "ok"
        yield _row(name, dates, _NEXT.get(name, _NEW_VERSION), state=state, age_days=age, good_for_days=limit)


def _describe_credentials() -> dict[str, Any]:
    """Return what credentials there are, as far as no request and no program tells."""
    part, needs = "AWS credentials", "aws configure, or AWS_PROFILE; to choose a fleet none are needed"
    session = Session()
    try:
        providers = session.get_component("credential_provider")
        for name in _ASKING_PROVIDERS:
            providers.remove(name)
        credentials = providers.load_credentials()
        source = credentials.method if credentials else session.get_scoped_config().get("role_arn")
    except errors.AWS_ERRORS as error:
        return _row(part, errors.reason(error), needs, state="missing")
    if source is None:
        return _row(part, "", f"{needs}; a machine's role is not looked for")
    return _row(part, f"by {source}: {_REFRESH} reads prices", errors.CHECK_CREDENTIALS)
