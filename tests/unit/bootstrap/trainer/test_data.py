from __future__ import annotations

import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.data.dataset import Batch, Dataset
from bootstrap.trainer.data.loader import Loader
from bootstrap.trainer.data.open import Split, open_samples
from bootstrap.trainer.data.pack import main as pack_main
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.sample_order import SampleOrder

CPU = torch.device("cpu")
VOCABULARY = 70_000


KINDS = {"decoder": "llama", "encoder": "bert"}


def open_dataset(
    uri: str,
    *,
    family: str,
    split: Split = "train",
    image_size: int = 224,
    seq_len: int = 1,
    seed: int = 0,
    **shape: Any,
) -> Dataset:
    kind = {"torchvision": "resnet18"} if family == "cnn" else {"model_type": KINDS[family]}
    config = TrainerConfig(architecture=kind | shape, train_data=uri, seq_len=seq_len, seed=seed)
    return open_samples(config, split, image_size=image_size)


def write_tokens(folder: Path, name: str, tokens: list[int], form: str) -> None:
    """A token file as its own tool writes it."""
    dtype = "<u2" if form in ("nanogpt", "llm.c") else "<u4" if form == "packed" else "<i4"
    data = np.array(tokens, dtype=dtype).tobytes()
    if form == "llm.c":
        data = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + data
    (folder / f"{name}.bin").write_bytes(data)
    if form == "packed":
        (folder / f"{name}.json").write_text(json.dumps({"dtype": "uint32", "tokens": len(tokens)}))
    if form == "megatron":
        head = struct.pack("<QBQQ", 1, 4, 2, 2)  # two documents, the second of one token
        documents = struct.pack("<2i2q", len(tokens) - 1, 1, 0, 4 * len(tokens) - 4)
        (folder / f"{name}.idx").write_bytes(b"MMIDIDX\x00\x00" + head + documents)


@pytest.mark.parametrize("form", ["nanogpt", "llm.c", "packed", "megatron"])
def test_every_format_gives_the_same_samples_over_several_files(tmp_path: Path, form: str) -> None:
    write_tokens(tmp_path, "train-0", list(range(100, 121)), form)  # two samples of 9 tokens and a rest
    write_tokens(tmp_path, "train-1", list(range(500, 533)), form)  # four
    write_tokens(tmp_path, "val", list(range(9)), form)
    data = open_dataset(str(tmp_path), family="decoder", seq_len=8, vocab_size=VOCABULARY)

    batch = data.batch(torch.tensor([1, 2, 5]), CPU)

    assert len(data) == 6
    assert batch["input_ids"][:, 0].tolist() == [108, 500, 524] and batch["input_ids"].shape == (3, 8)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert len(open_dataset(str(tmp_path), family="decoder", seq_len=8, vocab_size=VOCABULARY, split="val")) == 1


@pytest.mark.parametrize(
    ("train", "val"), [("train/part-0", "val/part-0"), ("part-0", "val-0"), ("part-0", "val/part-0")]
)
def test_held_out_files_are_not_trained_on(tmp_path: Path, train: str, val: str) -> None:
    for name, first in ((train, 100), (val, 500)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tokens(tmp_path, name, list(range(first, first + 9)), "packed")
    for split, first in (("train", 100), ("val", 500)):
        data = open_dataset(str(tmp_path), family="decoder", seq_len=8, vocab_size=VOCABULARY, split=split)  # type: ignore[arg-type]
        assert data.batch(torch.arange(len(data)), CPU)["input_ids"][:, 0].tolist() == [first]
    with pytest.raises(ConfigurationError, match="has no val data"):
        open_dataset(str(tmp_path / f"{train}.bin"), family="decoder", seq_len=8, vocab_size=VOCABULARY, split="val")


def test_token_files_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path) -> None:
    def open_it(**changes: Any) -> Dataset:
        settings: dict[str, Any] = {"family": "decoder", "seq_len": 8, "vocab_size": VOCABULARY}
        return open_dataset(str(tmp_path), **settings | changes)

    with pytest.raises(ConfigurationError, match=r"has no train data; expected train\*\.bin"):
        open_it()
    write_tokens(tmp_path, "train", [*range(8), 65_000], "packed")
    with pytest.raises(ConfigurationError, match="none has the 10 tokens of one sample"):
        open_it(seq_len=9)
    with pytest.raises(ConfigurationError, match=r"token 65000 in .*vocabulary has 50000"):
        open_it(vocab_size=50_000).batch(torch.tensor([0]), CPU)
    with pytest.raises(ConfigurationError, match=r"has no val data"):
        open_it(split="val")
    with (tmp_path / "train.bin").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(ConfigurationError, match=r"has 5 tokens and its train\.json says 9: an incomplete copy"):
        open_it()
    for form, missing in (("llm.c", "header says 9"), ("megatron", r"train\.idx says 9")):
        (tmp_path / "train.json").unlink(missing_ok=True)
        write_tokens(tmp_path, "train", list(range(9)), form)
        with (tmp_path / "train.bin").open("r+b") as file:
            file.truncate((tmp_path / "train.bin").stat().st_size - 4)
        with pytest.raises(ConfigurationError, match=rf"has \d tokens and its {missing}: an incomplete copy"):
            open_it()
    (tmp_path / "train.idx").unlink()
    for vocabulary in (32_000, 128_256):
        np.arange(vocabulary - 200, vocabulary, dtype="<u4").tofile(tmp_path / "train.bin")
        with pytest.raises(ConfigurationError, match=r'of uint32.* train\.json, .*"tokens": 200'):
            open_it(vocab_size=vocabulary)
    (tmp_path / "train.json").write_text('{"dtype": ')
    with pytest.raises(ConfigurationError, match=r"train\.json is not JSON"):
        open_it()


def test_masking_is_bert_s_and_a_function_of_step_and_sample() -> None:
    data = open_dataset("", family="encoder", seq_len=512, vocab_size=1000, seed=3)
    indices = torch.arange(64)

    batch = data.batch(indices, CPU, step=7)

    predicted = batch["labels"] != -100
    masked = batch["input_ids"] == 999
    assert predicted.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (masked & predicted).sum().item() / predicted.sum().item() == pytest.approx(0.8, abs=0.03)
    kept = (batch["input_ids"] == batch["labels"]) & predicted
    assert kept.sum().item() / predicted.sum().item() == pytest.approx(0.1, abs=0.03)
    rank_1 = data.batch(indices[32:], CPU, step=7)
    assert torch.equal(rank_1["input_ids"], batch["input_ids"][32:])
    assert not torch.equal(data.batch(indices, CPU, step=8)["labels"], batch["labels"])


def test_synthetic_samples_can_be_learnt_and_differ_between_train_and_val() -> None:
    tokens = open_dataset("", family="decoder", seq_len=32, vocab_size=50).batch(torch.arange(100), CPU)
    strides = (tokens["labels"] - tokens["input_ids"]) % 50
    assert (strides == strides[:, :1]).all() and len(set(strides[:, 0].tolist())) > 5
    assert tokens["labels"].max().item() < 50

    images = open_dataset("", family="cnn", image_size=32, num_classes=10)
    batch = images.batch(torch.arange(200), CPU)
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert list(batch["images"].shape) == [200, 3, 32, 32]
    tints = batch["images"].mean((2, 3))
    within = torch.stack([tints[batch["labels"] == label].std(0).mean() for label in range(10)]).mean()
    assert within.item() < 0.2 * tints.std(0).mean().item()
    other = open_dataset("", family="cnn", image_size=32, num_classes=10, split="val").batch(torch.arange(200), CPU)
    assert not torch.equal(other["images"], batch["images"])


class Counting(Dataset):
    """Samples that are their own index, at a price in time, until an index that cannot be read."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.fetched = 0

    def __len__(self) -> int:
        return 40

    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        time.sleep(self.seconds)
        self.fetched += 1
        if int(indices.max()) >= 32:
            raise ConfigurationError(f"sample {int(indices.max())} is damaged")
        return {"x": indices, "step": torch.tensor(step)}


def test_loader_follows_the_steps_and_measures_the_wait() -> None:
    data = Counting(0.02)
    loader = Loader(data, lambda step: torch.arange(8, 16) + (16 * step) % 40, micro_batch=4, device=CPU)

    assert [batch["x"].tolist() for batch in loader.step(0)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert loader.wait_s > 0.01
    while data.fetched < 4:  # the next step is fetched ahead
        time.sleep(0.01)
    with_prefetch = list(loader.step(1))
    assert [batch["x"][0].item() for batch in with_prefetch] == [24, 28] and with_prefetch[0]["step"].item() == 1

    assert [len(batch["x"]) for batch in loader.step(0)] == [4, 4]
    with pytest.raises(ConfigurationError, match="sample 35 is damaged"), loader:
        list(loader.step(4))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three classes of two JPEGs and a PNG, in several sizes."""
    from torchvision.io import write_jpeg, write_png

    generator = torch.Generator().manual_seed(0)
    for label, name in enumerate(["cat", "dog", "emu"]):
        (tmp_path / "train" / name).mkdir(parents=True)
        # Left by macOS and Jupyter.
        (tmp_path / "train" / name / f"._{label}0.JPEG").write_bytes(b"Mac OS X")
        (tmp_path / "train" / ".ipynb_checkpoints").mkdir(exist_ok=True)
        for number in range(3):
            image = torch.randint(0, 256, (3, 40 + 20 * number, 60), dtype=torch.uint8, generator=generator)
            write, suffix = (write_png, "png") if number == 2 else (write_jpeg, "JPEG")
            write(image, str(tmp_path / "train" / name / f"{label}{number}.{suffix}"))
    return tmp_path


def test_images_come_from_worker_processes_as_they_come_without_them(image_folder: Path) -> None:
    data = open_dataset(str(image_folder), family="cnn", image_size=32, num_classes=5, seed=1)
    order = SampleOrder(dataset_size=len(data), global_batch=4, seed=0)
    before = torch.get_rng_state()

    with Loader(data, order.indices, micro_batch=2, device=CPU) as loader:
        batches = [batch for step in (3, 4) for batch in loader.step(step)]

    expected = [data.batch(part, CPU, step=step) for step in (3, 4) for part in torch.split(order.indices(step), 2)]
    assert len(data) == 9
    assert all(torch.equal(one[key], two[key]) for one, two in zip(batches, expected, strict=True) for key in one)
    assert batches[0]["images"].shape == (2, 3, 32, 32)
    assert torch.equal(torch.get_rng_state(), before), "the loader drew from the training's generator"
    assert data.batch(torch.arange(9), CPU)["labels"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    first, second = (data.batch(torch.tensor([4]), CPU, step=step)["images"] for step in (0, 9))
    assert not torch.equal(first, second), "an epoch's augmentation repeats in the next"


def test_validation_images_are_whole_and_broken_ones_are_named(image_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no val data"):
        open_dataset(str(image_folder), family="cnn", split="val")
    with pytest.raises(ConfigurationError, match="has 3 class folders, and the model has 2 classes"):
        open_dataset(str(image_folder), family="cnn", num_classes=2)
    (image_folder / "train").rename(image_folder / "val")
    data = open_dataset(str(image_folder), family="cnn", image_size=32, split="val")
    assert torch.equal(
        data.batch(torch.tensor([0]), CPU)["images"], data.batch(torch.tensor([0]), CPU, step=5)["images"]
    )
    wide = Image.fromarray(np.full((40, 40), 0x80FF, dtype=np.uint16))
    wide.save(image_folder / "val" / "cat" / "02.png")
    assert data._image(2, 0).dtype == torch.uint8 and set(data._image(2, 0).unique().tolist()) == {0x80}  # type: ignore[attr-defined]
    (image_folder / "val" / "cat" / "00.JPEG").write_bytes(b"not an image")
    with pytest.raises(ConfigurationError, match=r"00\.JPEG cannot be decoded"):
        data.batch(torch.tensor([0]), CPU)


def test_validation_classes_have_the_numbers_of_training(image_folder: Path) -> None:
    shutil.copytree(image_folder / "train", image_folder / "val")
    shutil.rmtree(image_folder / "val" / "cat")
    data = open_dataset(str(image_folder), family="cnn", image_size=32, split="val")
    assert data.batch(torch.arange(6), CPU)["labels"].tolist() == [1, 1, 1, 2, 2, 2]
    (image_folder / "val" / "fox").mkdir()
    with pytest.raises(ConfigurationError, match=r"val has class folders that .*train lacks: fox"):
        open_dataset(str(image_folder), family="cnn", split="val")


def test_packed_text_is_read_back_with_an_end_token_after_each_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: number for number, word in enumerate(["<|endoftext|>", "a", "b", "c", "[UNK]", "[MASK]", "d"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n\n')
    (tmp_path / "y.txt").write_text("b c zebra\n")
    out = tmp_path / "out" / "train.bin"
    common = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(out)]

    assert pack_main([str(tmp_path / "x.jsonl"), str(tmp_path / "y.txt"), *common]) == 0

    assert "9 tokens of 3 documents" in capsys.readouterr().out
    data = open_dataset(str(out.parent), family="decoder", seq_len=8, vocab_size=5)
    assert data.batch(torch.tensor([0]), CPU)["input_ids"].tolist() == [[1, 2, 0, 3, 0, 2, 3, 4]]
    masked = open_dataset(str(out.parent), family="encoder", seq_len=9, vocab_size=7)
    seen = torch.cat([masked.batch(torch.tensor([0]), CPU, step=step)["input_ids"] for step in range(40)])
    assert (seen == 5).sum() > 20, "the tokenizer's mask"
    assert (seen == 6).sum() < 5
    # A file's text says what it is, whatever its name.
    for name, content, count in (
        ("x.json", b'\xef\xbb\xbf{"text": "a b"}\n{"text": "c"}\n', "5 tokens of 2 documents"),
        ("x.txt", b'\r\n{"text": "a b"}\r\n{"text": "c"}', "5 tokens of 2 documents"),
        ("x.json", b'[{"text": "a b"},\n {"text": "c"}]', "5 tokens of 2 documents"),
        ("list.txt", b'[{"text": "a b"},\n {"text": "c"}]', "5 tokens of 2 documents"),
        ("x.ipynb", b'{\n "a": "b"}', "8 tokens of 1 documents"),
        ("x.json", b'{\n "text": "a b"}', "3 tokens of 1 documents"),
        ("x.md", b'{"a": "b"}\n\xc3\xa9', "8 tokens of 1 documents"),
        ("x.jsonl", b'{"text": "a \\ud83d b"}\n{"text": "\\ud83d\\ude00"}', "6 tokens of 2 documents"),
    ):
        (tmp_path / name).write_bytes(content)
        assert pack_main([str(tmp_path / name), *common]) == 0
        said = capsys.readouterr()
        assert count in said.out and ("x.jsonl:1: half of a surrogate pair" in said.err) == (name == "x.jsonl")
    packed = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    for text, says in {
        b'{"text": "a b"}\n{"body": "c"}\n': "x.jsonl:2 has no text 'text'",
        b'{"text": "a b"}\n{"text": null}\n': "x.jsonl:2 has no text 'text'",
        b'{"text": "a b"}\n{"text": "a b\xff"}\n': "x.jsonl:2 is no JSON",
        b'{"text": "a b"}\n{"text": "a': "x.jsonl:2 is no JSON",
        b"[" * 100_000: "x.jsonl:1 is no JSON",
        b'["a b"]\n': "x.jsonl:1 has no text 'text'",
        b"\n": "no document with text in",
        b'{"text": ""}\n': "no document with text in",
    }.items():
        (tmp_path / "x.jsonl").write_bytes(text)
        assert pack_main([str(tmp_path / "x.jsonl"), *common]) == 1
        assert says in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == packed
    assert pack_main([str(tmp_path / "y.txt"), *common[:-1], str(out.with_suffix(""))]) == 1
    assert "expected NAME.bin" in capsys.readouterr().err
    (tmp_path / "z.txt").write_bytes(b"PK\3\4\0")
    assert pack_main([str(tmp_path / "z.txt"), *common]) == 1 and "z.txt has zero bytes" in capsys.readouterr().err
    (tmp_path / "z.txt").write_bytes(b'{"body": "a"}\n{"body": "b"}\n')
    assert (
        pack_main([str(tmp_path / "z.txt"), *common]) == 1 and "z.txt:1 has no text 'text'" in capsys.readouterr().err
    )
    (tmp_path / "tokenizer.json").write_text("{")
    assert pack_main([str(tmp_path / "y.txt"), *common]) == 1
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
