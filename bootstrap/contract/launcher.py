"""Start of a training command: by torchrun, or as a program with a launcher of its own."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
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
# Options by which a launcher of any name starts several ranks; with the others, what the nodes give torchrun.
RANK_OPTIONS = frozenset({"nproc-per-node", "nnodes"})
GIVEN_OPTIONS = RANK_OPTIONS | frozenset(
    {"node-rank", "standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port"}
)
# Launchers of clusters whose daemons no node has. A model is named Flux, too.
CLUSTERS = frozenset({"srun", "sbatch", "salloc", "qsub", "bsub", "jsrun", "aprun", "flux run", "flux submit"})
# First words, and words anywhere, that only a shell understands. The nodes start the command without one.
SHELL_FIRST = frozenset(
    {"cd", "export", "source", ".", "set", "unset", "ulimit", "exec", "eval", "if", "for", "while", "(", "{", "pushd"}
)
SHELL_WORDS = frozenset({"&&", "||", ">>", "2>", "2>&1", "&>"})
# These may be an option's value: --separator '|'.
SHELL_SIGN = re.compile(r"[;|&<>]$|\d?>>?[\w./~$]")
# Programs that read a command from an option's value: bash -lc, env -S.
READERS = frozenset({"sh", "bash", "dash", "zsh", "fish", "env"})
READS_TEXT = re.compile(r"-\w*[cS]")
MANAGERS = frozenset({"poetry", "pdm", "pipenv", "uv"})  # also as modules: python -m poetry run
SCRIPT = re.compile(r".+\.(py|pyc|pyz|sh)", re.DOTALL)


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
    shell = list(words[:1]) if words and (words[0] in SHELL_FIRST or re.match(r"\w+=", words[0])) else []
    shell += [word for word in words if word in SHELL_WORDS or re.fullmatch(r"[\w./-]+;", word)]
    shell += [word for last, word in itertools.pairwise(words) if SHELL_SIGN.match(word) and not last.startswith("-")]
    if shell:
        yield f"{shell[0]} is a shell's, and no shell reads the command: put it into a script, or say bash -c '...'"
        return
    head, started = words_before_script(words), started_by(words)
    if found := CLUSTERS & started:
        yield f"{min(found)} starts ranks by a cluster's daemons, which no node has: give the script alone"
        return
    launchers, by_ssh = ONE_NODE & started, BY_SSH & started
    if start_of(words) == "torchrun":
        for name in sorted(launchers | by_ssh):
            yield f"{name} would start in each rank that the nodes' torchrun starts: give the script alone"
        own = itertools.takewhile(lambda word: word not in ("-m", "--module", "--no-python", "--no_python"), head)
        for option in sorted(_options(own)):
            # torchrun takes options that are cut short.
            if any(given.startswith(option) for given in GIVEN_OPTIONS):
                yield f"--{option} is the nodes' to give, as nodes with another do not meet: give the script alone"
        return
    if not is_gang:
        return
    if by_ssh:
        yield f"{min(by_ssh)} reaches other nodes by SSH, which they do not answer: give the script alone"
    if by_ssh or any("MASTER_ADDR" in word for word in words):
        return
    for name in sorted(launchers) or sorted(RANK_OPTIONS & _options(head))[:1]:
        yield (
            f"{name} has no option with ${{MASTER_ADDR}}, so each node would train by itself: give it its options for "
            "several nodes, or the script alone, which the nodes start under torchrun"
        )


def started_by(words: Sequence[str]) -> set[str]:
    """Names of programs and of launchers' modules in a command and in a shell's text, and pairs of names.

    They may stand behind wrappers (env, numactl, ``uv run``), so every word before a script counts.
    """
    head = words_before_script(words)
    names = [PurePath(word).name for word in head]
    if "install" in names:
        return set()  # packages have the same names
    found = {*names, *map(" ".join, itertools.pairwise(names))}
    # -m torch.distributed.run, -umtorch.distributed.run, .../torch/distributed/run.py
    dotted = [word.removesuffix(".py").replace("/", ".") for word in words[: len(head) + 1]]
    found |= {name for module, name in MODULES.items() if any(word.endswith(module) for word in dotted)}
    for option, text in itertools.pairwise(head if READERS & found else ()):
        if READS_TEXT.fullmatch(option):
            for command in re.split(r"[;&|()`\n]+", text):
                found |= started_by(split_command(command) or command.split())
    return found


def words_before_script(words: Sequence[str]) -> list[str]:
    """Words before the first script, or up to the module that Python runs: what follows is its own."""
    head, is_python = list[str](), start_of(words) == "torchrun"
    for last, word in itertools.pairwise(["", *words]):
        if SCRIPT.fullmatch(word) and not READS_TEXT.fullmatch(last):
            break
        head.append(word)
        if is_python and re.fullmatch(r"-\w*m", last) and word not in MANAGERS:
            break
        is_python |= PurePath(word).name.startswith("python")
    return head


def _options(words: Iterable[str]) -> set[str]:
    """Names of the long options among words, as torchrun reads them."""
    return {word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--") and word != "--"}


def loses_sigterm(words: Sequence[str]) -> bool:
    """Return whether a command starts `conda run`, which SIGTERM ends while its own command goes on, untold.

    https://github.com/conda/conda/blob/26.7.1/conda/gateways/subprocess.py
    """
    return "conda run" in started_by(words)


def names_of(words: Sequence[str]) -> set[str]:
    """Return the words without their folders."""
    return {PurePath(word).name for word in words}
