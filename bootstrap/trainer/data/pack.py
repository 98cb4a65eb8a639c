"""Packer of text into token files: ``python -m bootstrap.trainer.data.pack``."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bootstrap.training.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# One call of the tokenizer, which uses all cores.
DOCUMENTS = 1024
# Names of the token after a document in common tokenizers, tried in this order.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Names of the token that stands for one to predict (BERT's, RoBERTa's).
MASK_TOKENS = ("[MASK]", "<mask>")


def main(arguments: list[str] | None = None) -> int:
    """Write the file and its sidecar; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.trainer.data.pack", description="Tokenise text for training."
    )
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="FILE", help=".jsonl: a document a line; others: a document a file"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="train.bin or val.bin; NAME.json is written beside it")
    parser.add_argument("--field", default="text", help="the document in a JSONL line (default: text)")
    parser.add_argument("--end-token", help="token after each document (default: the tokenizer's, by its usual names)")
    options = parser.parse_args(arguments)
    try:
        tokens, documents = pack(
            options.inputs,
            tokenizer=options.tokenizer,
            out=options.out,
            field=options.field,
            end_token=options.end_token,
        )
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{options.out}: {tokens:,} tokens of {documents:,} documents\n")
    return 0


def pack(
    inputs: list[Path], *, tokenizer: Path, out: Path, field: str = "text", end_token: str | None = None
) -> tuple[int, int]:
    """Tokens and documents written; both files take the place of earlier ones only when they are whole."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigurationError("packing needs the tokenizers package: pip install tokenizers") from error
    if not tokenizer.is_file():
        raise ConfigurationError(f"{tokenizer} does not exist; expected a model's tokenizer.json")
    if out.suffix != ".bin":
        raise ConfigurationError(f"--out is {out}; expected NAME.bin, which the trainer looks for")
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigurationError(f"{tokenizer} cannot be read ({error}); expected a model's tokenizer.json") from error
    end = _end_token_id(loaded, end_token)
    dtype = np.dtype("<u2" if loaded.get_vocab_size() <= 2**16 else "<u4")
    documents = _documents(inputs, field)
    temporary, facts_file = out.with_suffix(".new"), out.with_suffix(".json.new")
    tokens = count = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            while texts := list(islice(documents, DOCUMENTS)):
                for encoding in loaded.encode_batch_fast(texts, add_special_tokens=False):
                    tokens += file.write(np.array([*encoding.ids, end], dtype=dtype).tobytes()) // dtype.itemsize
                count += len(texts)
        facts = {
            "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
            "tokens": tokens,
            "documents": count,
            "vocab_size": loaded.get_vocab_size(),
            "end_token_id": end,
            "mask_token_id": next((n for name in MASK_TOKENS if (n := loaded.token_to_id(name)) is not None), None),
            "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        }
        facts_file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        facts_file.replace(out.with_suffix(".json"))
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
        facts_file.unlink(missing_ok=True)
    return tokens, count


def _end_token_id(tokenizer: Tokenizer, name: str | None) -> int:
    for candidate in END_TOKENS if name is None else (name,):
        if (number := tokenizer.token_to_id(candidate)) is not None:
            return int(number)
    raise ConfigurationError(
        f"the tokenizer has no token {name or ' or '.join(END_TOKENS)}; name the end of a document with --end-token"
    )


def _documents(inputs: list[Path], field: str) -> Iterator[str]:
    for path in inputs:
        if not path.is_file():
            raise ConfigurationError(f"{path} does not exist; expected text or .jsonl files")
        try:
            if path.suffix == ".jsonl":
                with path.open(encoding="utf-8") as lines:
                    yield from (_text(line, field, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip())
            else:
                yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8 ({error})") from error


def _text(line: str, field: str, place: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{place} has no {field!r} ({error}); expected JSON objects; --field names their text"
        ) from error
    if not isinstance(text, str):
        raise ConfigurationError(f"{place} has the {field} {str(text)[:100]}; expected a text; --field names it")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
