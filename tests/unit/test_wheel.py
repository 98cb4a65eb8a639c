"""A newcomer's first commands, run by the wheel in a folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.wheel import REPOSITORY, install_wheel, run_shell


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_tracked_file_of_the_packages_but_readmes(site: Path) -> None:
    listed = ["git", "ls-files", "infra", "optimizer", "bootstrap"]
    tracked = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    missing = [name for name in tracked if not (site / name).is_file()]
    own = "optimizer/commands/init/files/README.md"
    assert missing == [name for name in tracked if name.endswith("README.md") and name != own] != []


def test_links_between_the_wheels_pages_lead_to_a_page(site: Path) -> None:
    (pages,) = site.glob("*.data/data/share/doc/gpufleet")
    links = {
        link
        for page in pages.glob("*.md")
        for link in re.findall(r"\]\((?!https?:|\.\./)([^)#]+)", page.read_text("utf-8"))
    }
    assert "README.md" in {page.name for page in pages.iterdir()} and "quick-start.md" in links
    assert not [link for link in links if not (pages / link).is_file()]


def test_a_folder_of_init_goes_from_a_request_to_a_stack(site: Path, tmp_path: Path) -> None:
    """The commands of "Choose a fleet" in the README that init lays out."""
    run_shell("gpufleet init fleet", site=site, folder=tmp_path)
    project = tmp_path / "fleet"
    readme = (project / "README.md").read_text(encoding="utf-8")
    script = readme.split("## Choose a fleet")[1].split("```sh\n")[1].split("```")[0]
    assert "recommend" in script and "stack set" in script and "preview" in script
    shown = run_shell(script, site=site, folder=project)
    assert f"{site}/bootstrap/requirements-node.txt" in readme, "the checkout ran, not the wheel"
    config = yaml.safe_load((project / "Pulumi.dev.yaml").read_text(encoding="utf-8"))["config"]
    plan = config["gpufleet:plan"]
    assert plan["job"]["model"] == "llama-3.1-8b" and plan["instance_type"] in shown.partition("\n")[2]


def test_the_quick_starts_offline_commands_run(site: Path, tmp_path: Path) -> None:
    """All commands of gpufleet before the page's heading "On AWS", on the files that the page shows."""
    page = (REPOSITORY / "docs" / "quick-start.md").read_text(encoding="utf-8").split("\n## On AWS\n")[0]
    for file, text in re.findall(r"^`([\w.-]+)`:\n\n```yaml\n(.*?)```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / file).write_text(text, encoding="utf-8")
    lines = "".join(re.findall(r"^```sh\n(.*?)```", page, re.MULTILINE | re.DOTALL)).splitlines(keepends=True)
    script = [line for line in lines if line.startswith(("gpufleet ", "cd "))]
    script.insert(script.index("cd my-fleet\n") + 1, "cp ../*.yaml .\n")
    assert {"init", "recommend", "preview", "stack"} <= {line.split()[1] for line in script}
    run_shell("".join(script), site=site, folder=tmp_path)


def test_the_python_section_runs(site: Path, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "quick-start.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    run_shell(f'"{sys.executable}" page.py && gpufleet preview plan.json', site=site, folder=tmp_path)
