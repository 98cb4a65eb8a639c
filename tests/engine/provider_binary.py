"""Find terraform-provider-aws on this machine.

Searched in this order: the environment variable, the folders Terraform itself searches
(https://developer.hashicorp.com/terraform/cli/config/config-file#implied-local-mirror-directories), mirrors and the
plugin cache named in its configuration, mirrors elsewhere under the usual system folders, and ``terraform init``.
The newest version found in the first place that has one is taken.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "GPUFLEET_AWS_PROVIDER"
SYSTEM_ROOTS = (Path("/opt"), Path("/usr/share"), Path("/usr/local/share"), Path("/var/lib"))
# HOSTNAME/NAMESPACE/TYPE/VERSION/OS_ARCH/BINARY is Terraform's "unpacked" mirror layout.
UNPACKED = "registry.terraform.io/hashicorp/aws/*/*/terraform-provider-aws*"
HOW_TO_GET_IT = (
    f"set {VARIABLE} to the binary, or put terraform on PATH (`terraform init` then downloads it), or install it into "
    "a mirror with `terraform providers mirror /usr/local/share/terraform/plugins` "
    "(https://developer.hashicorp.com/terraform/cli/commands/providers/mirror)"
)
REQUIREMENT = """terraform {
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100" }
  }
}
"""


def find_provider_binary(environment: Mapping[str, str], scratch: Path) -> Path | None:
    """The binary, or None where there is none.

    Args:
        environment: normally ``os.environ``.
        scratch: an empty folder for ``terraform init``.

    Raises:
        FileNotFoundError: the environment variable names something that is not an executable file.
    """
    named = environment.get(VARIABLE)
    if named:
        path = Path(named)
        if not os.access(path, os.X_OK) or not path.is_file():
            raise FileNotFoundError(f"{VARIABLE} is {named!r}, which is not an executable file")
        return path
    for folder in plugin_folders(environment):
        binary = newest(folder.glob(UNPACKED))
        if binary:
            return binary
    for root in SYSTEM_ROOTS:
        binary = newest(path for depth in ("", "*/", "*/*/") for path in root.glob(depth + UNPACKED))
        if binary:
            return binary
    return download(environment, scratch)


def plugin_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    """The folders Terraform searches for unpacked providers, and those its configuration names."""
    home = Path(environment.get("HOME", "/"))
    settings = Path(environment.get("TF_CLI_CONFIG_FILE") or home / ".terraformrc")
    if settings.is_file():
        yield from folders_in_settings(settings.read_text(encoding="utf-8"))
    if environment.get("TF_PLUGIN_CACHE_DIR"):
        yield Path(environment["TF_PLUGIN_CACHE_DIR"])
    yield home / ".terraform.d/plugins"
    data_home = environment.get("XDG_DATA_HOME") or str(home / ".local/share")
    data_folders = environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    for folder in (data_home, *data_folders.split(":")):
        yield Path(folder) / "terraform/plugins"


def folders_in_settings(text: str) -> Iterator[Path]:
    """``filesystem_mirror`` paths and ``plugin_cache_dir`` of a Terraform CLI configuration file."""
    text = re.sub(r"(?m)^\s*(#|//).*$", "", text)
    for block in re.findall(r"filesystem_mirror\s*\{([^}]*)\}", text):
        yield from (Path(path) for path in re.findall(r'path\s*=\s*"([^"]+)"', block))
    for path in re.findall(r'plugin_cache_dir\s*=\s*"([^"]+)"', text):
        yield Path(os.path.expandvars(path))


def newest(candidates: Iterator[Path]) -> Path | None:
    """The executable of the highest version among ``candidates``, whose folders are named VERSION/OS_ARCH."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", path.parent.parent.name))

    usable = [path for path in candidates if path.is_file() and os.access(path, os.X_OK) and fits_this_machine(path)]
    return max(usable, key=version, default=None)


def fits_this_machine(path: Path) -> bool:
    """True where the folder's OS_ARCH is this machine's."""
    system, machine = os.uname().sysname.lower(), os.uname().machine
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    return path.parent.name == f"{system}_{architecture}"


def download(environment: Mapping[str, str], scratch: Path) -> Path | None:
    """Let Terraform fetch the provider into ``scratch``; None where there is no terraform or it cannot."""
    terraform = shutil.which("terraform", path=environment.get("PATH"))
    if terraform is None:
        return None
    (scratch / "main.tf").write_text(REQUIREMENT, encoding="utf-8")
    done = subprocess.run(
        [terraform, "init", "-input=false", "-no-color"], cwd=scratch, env=dict(environment), capture_output=True
    )
    return newest((scratch / ".terraform/providers").glob(UNPACKED)) if done.returncode == 0 else None
