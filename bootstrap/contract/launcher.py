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
# Programs that start the command among their arguments: the words before it ("*": any word), and the options that take
# the next word as a value. uv and the like are also modules: python -m poetry run.
WRAPPERS = {
    name: own
    for names, own in {
        "! { do elif else if then until while": "",  # a shell's
        "command dumb-init exec nohup setsid time which": "",
        "apptainer singularity": "exec * -B -H --bind --env --home --pwd",
        "chrt taskset": "*",
        "conda mamba micromamba": "run -n -p --name --prefix --cwd",
        "env": "-C -u --chdir --unset",
        "nice": "-n --adjustment",
        "nsys": "profile -c -d -o -t -y --capture-range --output --trace",
        "numactl": "-C -N -P -i -m -p --cpunodebind --interleave --membind --physcpubind --preferred",
        "poetry pdm pipenv pixi": "run -C -P -e -p --directory --environment --project",
        "stdbuf": "-e -i -o --error --input --output",
        "timeout": "* -k -s --kill-after --signal",
        "tini": "-e -p",
        "uv": "run -p -w --directory --env-file --extra --group --index --package --project --python --with "
        "--with-editable --with-requirements",
    }.items()
    for name in names.split()
}
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
    launchers, by_ssh = ONE_NODE & started, BY_SSH & started
    if start_of(words) == "torchrun":
        for name in sorted(launchers | by_ssh):
            yield f"{name} would start in each rank that the nodes' torchrun starts: give the script alone"
        own = itertools.takewhile(lambda word: word not in ("-m", "--module", "--no-python", "--no_python"), words)
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
    *_, last = _programs(words)
    for name in sorted(launchers) or sorted(RANK_OPTIONS & _options(last))[:1]:
        yield (
            f"{name} has no option with ${{MASTER_ADDR}}, so each node would train by itself: give it its options for "
            "several nodes, or the script alone, which the nodes start under torchrun"
        )


def started_by(words: Sequence[str]) -> set[str]:
    """Names of the programs and of the launchers' modules that a command starts, and each with its subcommand."""
    return {name for first, *rest in _programs(words) for name in (first, f"{first} {next(_plain(rest), '')}")}


def _programs(words: Sequence[str]) -> Iterator[list[str]]:
    """Commands that a command is made of, the last at its end: a name without folders, and its arguments.

    An argument that is named like a launcher (``--launcher srun``, ``-n deepspeed``) starts nothing.
    """
    if start_of(words) == "torchrun":
        head = list(itertools.takewhile(lambda word: not SCRIPT.fullmatch(word), words))
        at = next((at for at, word in enumerate(head, 1) if word in ("--no-python", "--no_python")), 0)
        words = words[at:] if at else ["python", *words]
    words = list(itertools.dropwhile(re.compile(r"\w+=").match, words))
    if not words:
        yield [""]
        return
    name, rest = PurePath(words[0]).name, words[1:]
    own = list(itertools.takewhile(lambda word: not SCRIPT.fullmatch(word), rest))
    pairs = list(itertools.pairwise(["", *rest]))[: len(own) + 1]
    if name in READERS and (texts := [text for option, text in pairs if READS_TEXT.fullmatch(option)]):
        yield [name, *rest]
        for command in re.split(r"[;&|()`\n]+", texts[0]):
            yield from _programs(split_command(command) or command.split())
        return
    if name in WRAPPERS and (command := _wrapped(rest, WRAPPERS[name].split())):
        yield [name, *rest]
        yield from _programs(command)
        return
    module, after = _module(rest)
    path = module.removesuffix(".py").replace("/", ".")
    yield [MODULES.get(name, name), *([] if name.startswith("python") else rest)]
    if launcher := next((launcher for suffix, launcher in MODULES.items() if path.endswith(suffix)), ""):
        yield [launcher]
    elif name.startswith("python") and module in WRAPPERS:
        yield from _programs([module, *after])
    elif name not in ONE_NODE and len(own) < len(rest):
        # A wrapper that nobody listed (sudo -E torchrun x.py): a launcher's name before a script, no option's value.
        for at, (last, word) in enumerate(pairs[:-1]):
            is_value = re.fullmatch(r"--[\w-]+", last) or "python" in " ".join(own[at:])
            if PurePath(word).name in ONE_NODE and not is_value:
                yield from _programs(rest[at:])
                return


def _wrapped(words: Sequence[str], own: list[str]) -> Sequence[str]:
    """Words of the command that a wrapper starts, after its ``own``; none where its subcommand is another."""
    before = list(_plain(own))
    at = 0
    while at < len(words) and (words[at].startswith("-") or before):
        if words[at].startswith("-"):
            at += words[at] in own
        elif before.pop(0) not in ("*", words[at]):
            return []
        at += 1
    return words[at:]


def _module(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Module (-m a.b, -uma.b) or script that Python runs, and the arguments after it."""
    for at, word in enumerate(words):
        if SCRIPT.fullmatch(word):
            return word, words[at + 1 :]
        if found := re.fullmatch(r"-[bBdEiIOPqsSuvx]*m(.*)|--module", word):
            after = words[at:] if found[1] else words[at + 1 :]
            return found[1] or "".join(after[:1]), after[1:]
    return "", []


def _plain(words: Iterable[str]) -> Iterator[str]:
    return (word for word in words if not word.startswith("-"))


def _options(words: Iterable[str]) -> set[str]:
    """Names of the long options before a script, as torchrun reads them."""
    own = itertools.takewhile(lambda word: not SCRIPT.fullmatch(word), words)
    return {word[2:].partition("=")[0].replace("_", "-") for word in own if word.startswith("--") and word != "--"}


def loses_sigterm(words: Sequence[str]) -> bool:
    """Return whether a command starts `conda run`, which SIGTERM ends while its own command goes on, untold.

    https://github.com/conda/conda/blob/26.7.1/conda/gateways/subprocess.py
    """
    return "conda run" in started_by(words)
