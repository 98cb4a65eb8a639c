from __future__ import annotations

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.frameworks import ALIASES, framework_name, frameworks
from optimizer.performance.types import Recipe
from tests.unit.optimizer.performance.fixtures import CALIBRATION


def test_an_unknown_framework_is_plain_pytorch_and_torchvision_for_a_cnn() -> None:
    assert framework_name("transformers") == framework_name("") == framework_name("my-own-code") == "torch"
    assert framework_name("Composer-FSDP") == "composer-fsdp"
    assert framework_name("", cnn=True) == framework_name("torchvision", cnn=True) == "torchvision"
    assert framework_name("megatron", cnn=True) == "megatron"


def test_aliases_and_borrowed_coefficients_name_profiles() -> None:
    assert set(ALIASES.values()) <= set(frameworks())
    for profile in frameworks().values():
        assert profile.fitted_as is None or profile.fitted_as in CALIBRATION.elementwise_traffic


def test_code_that_was_never_measured_has_the_coefficients_of_the_kernels_it_uses() -> None:
    gpu = gpu_table()["h100-80gb"]
    assert "torchtitan" not in CALIBRATION.elementwise_traffic
    borrowed, own = (
        CALIBRATION.coefficients(gpu, Recipe(seq_len=1, framework=name)) for name in ("torchtitan", "torch")
    )
    assert borrowed == own
