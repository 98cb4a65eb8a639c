"""`pulumi preview` in a folder of `gpufleet init`, whose program is the installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.deployment import Tools, deployment
from tests.plans import sample_plan
from tests.wheel import install_wheel, run_shell


@pytest.mark.engine
def test_the_engine_previews_a_folder_of_init_with_the_wheel(tools: Tools, tmp_path: Path) -> None:
    site = install_wheel(tmp_path / "wheel")
    run_shell("gpufleet init project", site=site, folder=tmp_path)
    with deployment(tools, tmp_path, "dev", packages=site) as deployed:
        deployed.set_plan(sample_plan())
        deployed.set_config({"nat": True})
        created = deployed.stack.preview().types()
        # One for the nodes on demand and one for the spot nodes.
        assert created["aws:ec2/launchTemplate:LaunchTemplate"] == 2
        assert created["aws:lambda/function:Function"] == 1
