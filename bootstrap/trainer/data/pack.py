"""Packer of text into token files: ``python -m bootstrap.trainer.data.pack``."""

from __future__ import annotations

import argparse
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON objects (lines, a list): a document each; other text: a document a file",
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="train.bin or val.bin; NAME.json is written beside it")
    parser.add_argument("--field", default="text", help="the document in a JSONL line (default: text)")
    parser.add_argument("--end-token", help="token after each document (default: the tokenizer's, by its usual names)")
    options = parser.parse_args(arguments)
    try:
        tokens, documents = _pack(options.inputs, options.tokenizer, options.out, options.field, options.end_token)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{options.out}: {tokens:,} tokens of {documents:,} documents\n")
    return 0


def _pack(inputs: list[Path], tokenizer: Path, out: Path, field: str, end_token: str | None) -> tuple[int, int]:
    """Tokens and documents written; both files take the place of earlier ones only when they are whole."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigurationError("packing needs the tokenizers package: pip install tokenizers") from error
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
                for encoding in _encoded(loaded, texts):
                    tokens += file.write(np.array([*encoding.ids, end], dtype=dtype).tobytes()) // dtype.itemsize
                count += len(texts)
        if tokens == count:  # the ends of empty documents
            raise ConfigurationError(f"no document with text in {', '.join(map(str, inputs))}")
        facts = {
            "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
            "tokens": tokens,
            "mask_token_id": next((n for name in MASK_TOKENS if (n := loaded.token_to_id(name)) is not None), None),
        }
        facts_file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        facts_file.replace(out.with_suffix(".json"))
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
        facts_file.unlink(missing_ok=True)
    return tokens, count


def _encoded(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> list[Any]:
    try:
        return tokenizer.encode_batch_fast([text for _, text in documents], add_special_tokens=False)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigurationError(f"{documents[0][0]} to {documents[-1][0]} cannot be tokenised: {error}") from error


def _end_token_id(tokenizer: Tokenizer, name: str | None) -> int:
    for candidate in END_TOKENS if name is None else (name,):
        if (number := tokenizer.token_to_id(candidate)) is not None:
            return int(number)
    raise ConfigurationError(
        f"the tokenizer has no token {name or ' or '.join(END_TOKENS)}; name the end of a document with --end-token"
    )


def _documents(inputs: list[Path], field: str) -> Iterator[tuple[str, str]]:
    """Place and text of each document. A file's content, and not its name, says whether it is JSON."""
    for path in inputs:
        try:
            with path.open("rb") as file:
                first = list(islice((line.removeprefix(BOM_UTF8) for line in file if line.strip()), 2))
                file.seek(0)
                if path.suffix in (".jsonl", ".ndjson") or _are_objects(first, field):
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield (
                                f"{path}:{number}",
                                _text(_loaded(f"{path}:{number}", line), field, f"{path}:{number}"),
                            )
                elif (items := _items(path, data := file.read(), field)) is not None:
                    for number, item in enumerate(items, 1):
                        yield f"{path}, item {number}", _text(item, field, f"{path}, item {number}")
                else:
                    text = data.decode("utf-8-sig")
                    if "\0" in text:
                        raise ConfigurationError(f"{path} has zero bytes; expected text, JSON lines or JSON")
                    yield str(path), text
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; expected text, JSON lines or JSON") from error


def _items(path: Path, data: bytes, field: str) -> list[Any] | None:
    """Items of a whole file of JSON; None of prose: a lone object without the field is a notebook, say."""
    try:
        value = _loaded(str(path), data)
    except ConfigurationError:
        if path.suffix == ".json":
            raise
        return None
    items = value if isinstance(value, list) else [value]
    has_objects = any(isinstance(item, dict) and (len(items) > 1 or field in item) for item in items)
    return items if path.suffix == ".json" or has_objects else None


def _are_objects(first: list[bytes], field: str) -> bool:
    """True for two lines of objects, or one with a document: prose may begin with another."""
    try:
        objects = [json.loads(line) for line in first if line.lstrip().startswith(b"{")]
    except (ValueError, RecursionError):
        return False
    return len(objects) == len(first) and (len(objects) == 2 or any(field in item for item in objects))


def _loaded(place: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{place} is no JSON ({error}); expected JSON objects, one a line or in a list"
        ) from error


def _text(item: Any, field: str, place: str) -> str:
    text = item.get(field) if isinstance(item, dict) else None
    if not isinstance(text, str):
        raise ConfigurationError(f"{place} has no text {field!r}; expected JSON objects; --field names their text")
    # JSON may hold half of a surrogate pair, which no tokenizer takes.
    if (whole := text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")) != text:
        sys.stderr.write(f"{place}: half of a surrogate pair in the {field} is packed as U+FFFD\n")
    return whole


if __name__ == "__main__":
    raise SystemExit(main())
