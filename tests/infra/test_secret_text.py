"""Secrets are seen, and what merely resembles one does not stop a deployment."""

from __future__ import annotations

import base64
import hashlib
import random
import string

import pytest

from infra.secret_text import secrets_in

# Made up here, so that no scanner takes this file for a leak.
AWS_KEY = "AKIA" + "Q3EGRMKV5XYZ2345"


@pytest.mark.parametrize(
    "text",
    [
        f"export AWS_ACCESS_KEY_ID={AWS_KEY}",
        "DB_PASSWORD=correct-horse",
        '{"apiKey": "correct-horse"}',
        "train.py --auth-token correct-horse",
        "WANDB_API_KEY=" + hashlib.sha1(b"x", usedforsecurity=False).hexdigest(),
        "train.py --token hf_" + "aB" * 17,
        "git clone https://ghp_" + "a1B2" * 9 + "@github.com/x/y",
        "pip install --index-url https://ann:correct-horse@pypi.example.com/simple x",
        "OPENAI=sk-" + "proj-" + "a1" * 12,
        "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    ],
)
def test_a_secret_is_seen_and_not_printed(text: str) -> None:
    (found,) = secrets_in(text)
    assert len(found) == len("12345678...")


def test_a_random_token_without_a_name_is_seen() -> None:
    """99 of 100 tokens of 32 letters and digits are seen; half of base64 at least, which "+" and "/" split."""
    chance = random.Random(0)  # noqa: S311  the same ones each time
    tokens = ["".join(chance.choices(string.ascii_letters + string.digits, k=32)) for _ in range(1000)]
    assert sum(bool(secrets_in(f"login {token}")) for token in tokens) >= 990
    keys = [base64.b64encode(chance.randbytes(30)).decode() for _ in range(1000)]
    assert sum(bool(secrets_in(f"login {key}")) for key in keys) >= 500


@pytest.mark.parametrize(
    "text",
    [
        "GPUFLEET_KMS_KEY_ARN=arn:aws:kms:us-east-1:000000000000:key/8f3c1a52-9a51-4c7e-8e0f-0f5a2b7c9d11",
        "e960e6f58bcef97b16f9fdc200d8d97da66bba9e4425d8fb07b5d1a96c8a1c96",
        'API_KEY="$(aws ssm get-parameter --name /gpufleet/dev/key --with-decryption)"',
        "SECRET_ARN=arn:aws:secretsmanager:us-east-1:000000000000:secret:x",
        "train.py --token-file /run/secrets/token --tokenizer meta-llama/Llama-2-7b-hf",
        "train.py --eos_token=</s> token=$TOKEN tokens=100000000000000000000 pad_token=[PAD]",
        "pip install --index-url https://pypi.example.com:8443/simple/@x/y https://$USER:$PASS@pypi.example.com x",
        "train.py --task-classification-on-imagenet-with-resnet50 --password-file /run/x",
        "python -m pkg.train_hf_conversion_of_checkpoints_and_everything_else",
        "GPUFLEET_LOG_GROUP=/gpufleet/a-very-long-sta-4ba579",
        "torchrun --config configs/Llama3_8B_FSDP2_Float8_SelectiveCheckpointing.toml",
        "s3://gpufleet-dev-000000000000-us-east-1/bootstrap/train-e960e6f58bcef97b16f9fdc200d8d97d.tar.gz",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert secrets_in(text) == []
