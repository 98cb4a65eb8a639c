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
# Launchers that train on their own node alone without the first node's address, and packages of modules for them.
ONE_NODE = frozenset({"torchrun", "accelerate launch", "accelerate-launch", "deepspeed", "composer", "colossalai run"})
MODULES = {
    "torch.distributed": "torchrun",
    "accelerate.commands": "accelerate launch",
    "deepspeed.launcher": "deepspeed",
    "composer.cli": "composer",
    "horovod.runner": "horovodrun",
}
STARTS = re.compile(rf"({'|'.join(MODULES)})\.(?:launch|launcher|run|runner|accelerate_cli)$")
# Options by which a launcher of any name starts several ranks; with the others, what the nodes give torchrun.
RANK_OPTIONS = frozenset({"nproc-per-node", "nnodes"})
GIVEN_OPTIONS = RANK_OPTIONS | frozenset(
    {"node-rank", "standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port"}
)
# Launchers of clusters whose daemons no node has. A model is named Flux, too.
CLUSTERS = frozenset({"srun", "sbatch", "salloc", "qsub", "bsub", "jsrun", "aprun", "flux run", "flux submit"})
# conda ends on SIGTERM while its own command goes on, untold:
# https://github.com/conda/conda/blob/26.7.1/conda/gateways/subprocess.py
LOSES_SIGTERM = "conda run"
STARTERS = frozenset({*BY_SSH, *ONE_NODE, *CLUSTERS, LOSES_SIGTERM})
# First words, and words anywhere, that only a shell understands. The nodes start the command without one.
SHELL_FIRST = frozenset(
    {"cd", "export", "source", ".", "set", "unset", "ulimit", "exec", "eval", "if", "for", "while", "(", "{", "pushd"}
)
SHELL_WORDS = frozenset({"&&", "||", ">>", "2>", "2>&1", "&>"})
# These may be an option's value: --separator '|'.
SHELL_SIGN = re.compile(r"[;|&<>]$|\d?>>?[\w./~$]|[<>]\(")
# Words of a shell before a command, and options whose value it reads as commands: bash -lc, env -S.
BEFORE = re.compile(r"\w+=.*|[!{]|do|elif|else|exec|if|nohup|then|until|while", re.DOTALL)
READS_TEXT = re.compile(r"-\w*[cS]")
READS_MODULE = r"-[bBdEiIOPqsSuvx]*m"
ENDS_OPTIONS = rf"{READS_MODULE}|--(module$|no[-_]python)"
# Options whose next word may be a value, launchers that are packages and environments, too, and the words after one.
TAKES_VALUE = re.compile(r"-(?!-$)[^=]+")
PACKAGES = frozenset({"composer", "deepspeed"})
NO_SCRIPT = re.compile(r"(^|/)python[\d.]*$|\.sh$")
# Word that a launcher starts its ranks by.
PROGRAM = re.compile(rf"(.*/)?python[\d.]*$|\.{{0,2}}/|.+\.(py|pyc|pyz|sh)$|{ENDS_OPTIONS}", re.DOTALL)
SUBSTITUTED = re.compile(r"(?:\$\(|`)\s*(?:which|command -v)\s+([\w./-]+)\s*[)`]")
# Variables that the nodes replace in a program's words.
EXPANDED = re.compile(r"\$\{(GPUFLEET_\w+|MASTER_ADDR|MASTER_PORT)\}")
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
    started = started_by(words)
    if found := CLUSTERS & started:
        yield f"{min(found)} starts ranks by a cluster's daemons, which no node has: give the script alone"
        return
    launchers, by_ssh = {name.partition(" ")[0] for name in ONE_NODE & started}, BY_SSH & started
    if start_of(words) == "torchrun":
        for name in sorted(launchers | by_ssh):
            yield f"{name} would start in each rank that the nodes' torchrun starts: give the script alone"
        for option in sorted(_options(words)):
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
    options = {option for command in _commands(words) for option in RANK_OPTIONS & _options(command)}
    for name in sorted(launchers) or sorted(options)[:1]:
        yield (
            f"{name} has no option with ${{MASTER_ADDR}}, so each node would train by itself: give it its options for "
            "several nodes, or the script alone, which the nodes start under torchrun"
        )


def started_by(words: Sequence[str]) -> set[str]:
    """Launchers that a command starts, those after wrappers and in a shell's text too.

    No rule reads all from words, so the agent also compares the ranks that it sees with the plan's.
    """
    return {name for command in _commands(words) for name in _starters(command)}


def loses_sigterm(words: Sequence[str]) -> bool:
    """Return whether SIGTERM does not reach a command's program."""
    return LOSES_SIGTERM in started_by(words)


def _commands(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Simple commands that a command is made of, a shell's in its text too."""
    if start_of(words) == "torchrun":
        head = _before_script(words)
        at = next((at for at, word in enumerate(head, 1) if word in ("--no-python", "--no_python")), 0)
        words = words[at:] if at else ["python", *words]
    words = list(itertools.dropwhile(BEFORE.fullmatch, words))
    yield words
    for option, text in itertools.islice(itertools.pairwise(words), len(_before_script(words))):
        if READS_TEXT.fullmatch(option):
            for command in re.split(r"[;&|()`\n]+", SUBSTITUTED.sub(r"\1", text)):
                yield from _commands(split_command(command) or command.split())


def _starters(command: Sequence[str]) -> Iterator[str]:
    """Launchers in a simple command: at its beginning, or before a program and no value of an option."""
    own = [*command[:1], *_before_script(command[1:])]  # a script may begin: ./with.sh torchrun train.py
    words = ["--", *own, *command[len(own) :][:1]]
    has_module = False
    for at, (last, word) in enumerate(itertools.pairwise(words), 1):
        path = re.sub(rf"^{READS_MODULE}|\.py$", "", word).replace("/", ".")
        if found := STARTS.search(path):
            yield MODULES[found[1]]
        name, after = PurePath(word).name, words[at + 1 :]
        has_module |= bool(re.fullmatch(READS_MODULE, last)) and not word.isdigit()  # numactl -m 0
        is_value = bool(TAKES_VALUE.fullmatch(last)) and (has_module or name in PACKAGES or "launcher" in last)
        scripts = [word for word in after if SCRIPT.fullmatch(word) or re.match(ENDS_OPTIONS, word)]
        is_value |= name in PACKAGES and (not scripts or bool(NO_SCRIPT.search(after[0])))
        if last == "--" or (any(map(PROGRAM.match, after)) and not is_value):
            yield from STARTERS & {name, " ".join((name, *after[:1]))}


def _before_script(words: Sequence[str]) -> list[str]:
    return list(itertools.takewhile(lambda word: not SCRIPT.fullmatch(word), words))


def _options(words: Sequence[str]) -> set[str]:
    """Names of the long options before a script or module, as torchrun reads them."""
    own = itertools.takewhile(lambda word: not re.match(ENDS_OPTIONS, word), _before_script(words))
    return {word[2:].partition("=")[0].replace("_", "-") for word in own if word.startswith("--") and word != "--"}
