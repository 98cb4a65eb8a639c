"""Start of a training command: by torchrun, or as a program with a launcher of its own."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal

Start = Literal["torchrun", "program"]

# Launchers that reach other nodes by SSH: those of Open MPI, MPICH and Intel MPI, and Horovod's.
BY_SSH = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"})
# Launchers that train on their own node alone without the first node's address, and modules that start them.
ONE_NODE = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed", "composer", "colossalai"})
MODULES = {
    "torch.distributed.launch": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launcher": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "composer.cli.launcher": "composer",
    "horovod.runner.launch": "horovodrun",
}
# Options of torchrun's kind, by which a launcher of any name starts several ranks.
RANK_OPTIONS = frozenset({"nproc-per-node", "nnodes"})
# Launchers of clusters whose daemons no node has.
CLUSTERS = frozenset({"srun", "sbatch", "salloc", "qsub", "bsub", "jsrun", "aprun", "flux"})
# First words, and words anywhere, that only a shell understands. The nodes start the command without one.
SHELL_FIRST = frozenset(
    {"cd", "export", "source", ".", "set", "unset", "ulimit", "exec", "eval", "if", "for", "while", "(", "{", "pushd"}
)
SHELL_WORDS = frozenset({"&&", "||", ">>", "2>", "2>&1", "&>"})
# These may be an option's value: --separator '|'.
SHELL_SIGN = re.compile(r"[;|&<>]$|\d?>>?[\w./~$]")
SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
# Programs, and words of a shell, that start the command behind their own options; some behind a word of their own.
MANAGERS = frozenset({"conda", "mamba", "micromamba", "uv", "poetry", "pdm", "pipenv", "pixi", "hatch", "nsys"})
STARTS = frozenset({"run", "exec", "profile"})
WRAPPERS = MANAGERS | frozenset(
    {"env", "exec", "command", "time", "nice", "ionice", "nohup", "setsid", "timeout", "stdbuf", "numactl", "taskset"}
    | {"chrt", "sudo", "unbuffer", "then", "do", "tini", "dumb-init", "catatonit", "xvfb-run", "uvx"}
)
# Options, variables, times, priorities and masks before the command.
SETTING = re.compile(r"-.*|\w+=.*|[\d.]+[smhd]?|0x[\da-f]+", re.DOTALL)


def split_command(text: str) -> list[str] | None:
    """Split at blanks outside quotes, as xargs does; None where a quote is open. Nothing is expanded."""
    words = shlex.shlex(text, posix=True, punctuation_chars=False)
    words.whitespace_split, words.commenters, words.escapedquotes = True, "", ""
    try:
        return list(words)
    except ValueError:
        return None


def start_of(words: Sequence[str]) -> Start:
    """Way in which the nodes start a command.

    torchrun: a script or options; torchrun runs it once a GPU. program: anything else; it runs once on each node.
    """
    starts_ranks = not words or words[0].startswith("-") or words[0].endswith((".py", ".pyc", ".pyz"))
    return "torchrun" if starts_ranks else "program"


def command_faults(words: Sequence[str], *, is_gang: bool) -> Iterator[str]:
    """Reasons why a command does not start, or why several nodes (``is_gang``) would not train together with it."""
    head = list(words[: _script(words)])
    started = started_by(words)
    shell = list(words[:1]) if words and (words[0] in SHELL_FIRST or re.match(r"\w+=", words[0])) else []
    shell += [word for word in words if word in SHELL_WORDS or re.fullmatch(r"[\w./-]+;", word)]
    shell += [word for last, word in itertools.pairwise(words) if SHELL_SIGN.match(word) and not last.startswith("-")]
    if shell:
        yield f"{shell[0]} is a shell's, and no shell reads the command: put it into a script, or say bash -c '...'"
        return
    names = names_of(head) | started
    if found := CLUSTERS & started:
        yield f"{min(found)} starts ranks by a cluster's daemons, which no node has: give the script alone"
        return
    launchers = names & ONE_NODE | {MODULES[name] for name in names & MODULES.keys()}
    by_ssh = BY_SSH & (names | launchers)
    if start_of(words) == "torchrun":
        for name in sorted(launchers | by_ssh if "-m" in head or "--no-python" in head else ()):
            yield f"{name} would start in each rank that the nodes' torchrun starts: give the script alone"
        return
    if not is_gang:
        return
    if by_ssh:
        yield f"{min(by_ssh)} reaches other nodes by SSH, which they do not answer: give the script alone"
    if by_ssh or any("MASTER_ADDR" in word for word in words):
        return
    options = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in head if word.startswith("--")}
    for name in sorted(launchers) or sorted(RANK_OPTIONS & options)[:1]:
        yield (
            f"{name} has no option with ${{MASTER_ADDR}}, so each node would train by itself: give it its options for "
            "several nodes, or the script alone, which the nodes start under torchrun"
        )


def started_by(words: Sequence[str]) -> set[str]:
    """Names of the programs and of Python's modules that a command starts, behind wrappers and in a shell's script.

    A wrapper with a word of its own counts with it, too: ``conda run``.
    """
    known, managers, program = SHELLS | ONE_NODE | BY_SSH | CLUSTERS, set[str](), 0
    for last, word in itertools.pairwise(["", *words]):
        name = PurePath(word).name
        is_value = last.startswith("-") and last != "--" and "=" not in last
        is_value &= name not in known and not name.startswith("python")
        is_start = word in STARTS and bool(managers)
        if not (is_start or is_value or name in WRAPPERS or SETTING.fullmatch(word)):
            break
        managers |= {name} & MANAGERS
        program += 1
    rest = list(words[program:])
    # A module of Python's may have the name of a cluster's program: python -m flux.
    names = names_of([word for last, word in itertools.pairwise(["", *words[: program + 1]]) if last != "-m"])
    names |= {f"{manager} {start}" for manager in managers for start in STARTS & set(words[:program])}
    for at, word in enumerate(rest[: _script(rest)]):
        if module := re.fullmatch(r"-[a-zA-Z]*?m(\w+\.[\w.]+)?", word):  # python -m MODULE, python -mMODULE
            names |= names_of([module[1] or " ".join(rest[at + 1 : at + 2])]) - CLUSTERS
    if len(rest) > 2 and PurePath(rest[0]).name in SHELLS and re.fullmatch(r"-\w*c", rest[1]):
        for command in re.split(r"[;&|()\n]+", rest[2]):
            names |= started_by(split_command(command) or command.split())
    return names


def _script(words: Sequence[str]) -> int:
    """Position of the first script: options behind it are its own."""
    return next((at for at, word in enumerate(words) if word.endswith((".py", ".pyc", ".pyz", ".sh"))), len(words))


def loses_sigterm(words: Sequence[str]) -> bool:
    """Return whether a command starts `conda run`, which SIGTERM ends while its own command goes on, untold.

    https://github.com/conda/conda/blob/26.7.1/conda/gateways/subprocess.py
    """
    return "conda run" in started_by(words)


def names_of(words: Sequence[str]) -> set[str]:
    """Return the words without their folders."""
    return {PurePath(word).name for word in words}
