"""Every command of the pages that needs no account runs, on files like those that the page names.

The pages of a newcomer's first steps run by the wheel (test_wheel.py), those that stand a fleet up in tests/engine.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.pages.demo_run import DEMO
from tests.unit.optimizer.commands.conftest import Gpufleet, gpufleet
from tests.wheel import REPOSITORY, run_shell

__all__ = ["gpufleet"]  # a fixture

OFFLINE = {
    *("init", "recommend", "report", "what-if", "offers", "estimate", "profile", "calibrate", "preview", "stack"),
    *("launch-config", "simulate"),
}
# What makes one of these ask AWS, a registry or another program.
ASKS = (
    *("--refresh", "--from-stack", "--image", "report demo", "&& pulumi"),
    "stack wheels",
)
# Starts of a simulation by default are 300, 7 s of processor time a command.
FEWER = {"simulate": ("--starts", "20")}
BY_THE_WHEEL = {"quick-start.md"}
# One command an engine, each for a plan that this engine carries out: tests/unit/optimizer/launch_config.
ALTERNATIVES = {"engines.md"}


def read_commands(page: Path) -> list[str]:
    """Lines of the page's blocks of shell that run without an account."""
    blocks = re.findall(r"^```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines]
    return [
        line
        for line, said in zip(lines, words, strict=True)
        if said[:1] == ["gpufleet"] and said[1] in OFFLINE and not any(part in line for part in ASKS)
    ]


PAGES = {
    page.name: commands
    for page in sorted([*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"])
    if page.name not in BY_THE_WHEEL | ALTERNATIVES and (commands := read_commands(page))
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what earlier commands of other pages write."""
    folder = tmp_path_factory.mktemp("made")
    request = REPOSITORY / "examples" / "request.yaml"
    script = f"gpufleet recommend {request} --save plans.json\ngpufleet calibrate --template > my_runs.csv"
    run_shell(script, site=REPOSITORY, folder=folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, made: Path) -> Path:
    """The files that the pages name."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "traces").mkdir()
    shutil.copy(REPOSITORY / "examples" / "request.yaml", tmp_path)
    shutil.copy(REPOSITORY / "Pulumi.yaml", tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(DEMO / "interrupted.jsonl", tmp_path / "checkpoints" / "ledger.jsonl")
    for name in ("pool", "traces/a", "traces/b", "zone-a", "zone-b", "pool-us-east-1a", "pool-us-east-1b"):
        metadata = {"gap_seconds": 600, "start_time": "2026-11-01T00:00:00Z"}
        trace = {"metadata": metadata, "data": [16 * (tick % 50 > 5) for tick in range(2000)]}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    prices = [
        {"AvailabilityZone": f"us-east-1{zone}", "InstanceType": "p4d.24xlarge", "ProductDescription": "Linux/UNIX"}
        | {"SpotPrice": usd, "Timestamp": f"2026-11-{day:02}T00:00:00+00:00"}
        for zone, usd in (("a", "20.0"), ("b", "10.0"))
        for day in (1, 9)
    ]
    (tmp_path / "history.json").write_text(json.dumps({"SpotPriceHistory": prices}))
    module = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "my_package").mkdir()
    imports = "import torch\nimport torchvision\nfrom torch.nn import functional as F\n\n\n"
    (tmp_path / "my_package" / "models.py").write_text(imports + module)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_commands_run(page: str, folder: Path, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for line in PAGES[page]:
        words, _, file = line.partition(" > ")
        arguments = [
            path
            for word in shlex.split(words, comments=True)[1:]
            for path in sorted(map(str, Path().glob(word))) or [word]
        ]
        code, out, err = gpufleet(*arguments, *FEWER.get(arguments[0], ()))
        assert code == 0, f"{line}: {err}"
        if file:
            Path(file.split()[0]).write_text(out, encoding="utf-8")


def test_the_pages_are_there() -> None:
    assert {"README.md", "plans.md", "spot.md", "models.md"} <= set(PAGES)
