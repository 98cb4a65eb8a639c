"""terraform-provider-aws comes from the places that Terraform searches, and nothing else is taken for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine import provider_binary
from tests.engine.provider_binary import VARIABLE, find_provider_binary, folders_in_settings, plugin_folders

SYSTEM = f"{os.uname().sysname.lower()}_{ {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(os.uname().machine) }"


@pytest.fixture(autouse=True)
def _an_empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_binary, "SYSTEM_ROOTS", (tmp_path / "opt",))


def install(mirror: Path, version: str, *, system: str = SYSTEM) -> Path:
    binary = mirror / f"registry.terraform.io/hashicorp/aws/{version}/{system}/terraform-provider-aws_v{version}_x5"
    binary.parent.mkdir(parents=True)
    binary.touch(mode=0o755)
    return binary


def machine(tmp_path: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), "PATH": "", "XDG_DATA_DIRS": str(tmp_path / "share"), **variables}


def find(environment: dict[str, str], tmp_path: Path) -> Path | None:
    return find_provider_binary(environment, tmp_path)


def test_none_is_found_on_an_empty_machine(tmp_path: Path) -> None:
    assert find(machine(tmp_path), tmp_path) is None


def test_the_variable_wins(tmp_path: Path) -> None:
    install(tmp_path / "home/.terraform.d/plugins", "6.0.0")
    named = install(tmp_path / "elsewhere", "5.0.0")
    assert find(machine(tmp_path, **{VARIABLE: str(named)}), tmp_path) == named


def test_a_variable_that_names_no_executable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{VARIABLE} is '/nowhere/provider'"):
        find(machine(tmp_path, **{VARIABLE: "/nowhere/provider"}), tmp_path)


@pytest.mark.parametrize(
    "folder", ["home/.terraform.d/plugins", "home/.local/share/terraform/plugins", "share/terraform/plugins", "opt/any"]
)
def test_usual_folders_and_mirrors_elsewhere_are_searched(folder: str, tmp_path: Path) -> None:
    binary = install(tmp_path / folder, "5.100.0")
    assert find(machine(tmp_path), tmp_path) == binary


def test_the_plugin_cache_is_searched(tmp_path: Path) -> None:
    binary = install(tmp_path / "cache", "5.100.0")
    assert find(machine(tmp_path, TF_PLUGIN_CACHE_DIR=str(tmp_path / "cache")), tmp_path) == binary


def test_mirrors_in_the_settings_are_searched_and_comments_are_not(tmp_path: Path) -> None:
    settings = tmp_path / "terraformrc"
    settings.write_text(
        f"""
        plugin_cache_dir = "{tmp_path}/cache"
        provider_installation {{
          filesystem_mirror {{
            path    = "{tmp_path}/mirror"
            include = ["registry.terraform.io/*/*"]
          }}
          # filesystem_mirror {{ path = "{tmp_path}/old" }}
        }}
        """
    )
    assert list(folders_in_settings(settings.read_text())) == [tmp_path / "mirror", tmp_path / "cache"]
    binary = install(tmp_path / "mirror", "5.100.0")
    assert find(machine(tmp_path, TF_CLI_CONFIG_FILE=str(settings)), tmp_path) == binary


def test_settings_that_do_not_exist_are_no_settings(tmp_path: Path) -> None:
    assert list(plugin_folders(machine(tmp_path, TF_CLI_CONFIG_FILE="/nowhere/terraformrc")))


def test_the_newest_version_for_this_machine_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "share/terraform/plugins"
    install(folder, "5.9.0")
    newest = install(folder, "5.100.0")
    install(folder, "6.0.0", system="plan9_mips")
    install(folder, "5.200.0").chmod(0o644)
    assert find(machine(tmp_path), tmp_path) == newest


def test_terraform_init_is_the_last_resort(tmp_path: Path) -> None:
    programs, scratch = tmp_path / "bin", tmp_path / "scratch"
    programs.mkdir()
    scratch.mkdir()
    terraform = programs / "terraform"
    binary = f".terraform/providers/registry.terraform.io/hashicorp/aws/6.1.0/{SYSTEM}/terraform-provider-aws_v6.1.0_x5"
    terraform.write_text(
        f'#!/bin/sh\n[ "$1" = init ] && grep -q hashicorp/aws main.tf || exit 1\n'
        f"/bin/mkdir -p $(/usr/bin/dirname {binary}) && /usr/bin/install -m 755 /dev/null {binary}\n"
    )
    terraform.chmod(0o755)
    environment = machine(tmp_path, PATH=f"{programs}:/usr/bin:/bin")
    assert find_provider_binary(environment, scratch) == scratch / binary


def test_a_terraform_that_cannot_download_leaves_none(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "terraform").write_text("#!/bin/sh\nexit 1\n")
    (programs / "terraform").chmod(0o755)
    assert find(machine(tmp_path, PATH=str(programs)), tmp_path) is None
