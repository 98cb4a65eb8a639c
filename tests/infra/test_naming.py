from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.naming import Names, slug, tags
from tests.infra.deployed import VARIANTS, variant

STACKS = st.text(alphabet=string.ascii_letters + string.digits + "-_.", min_size=1, max_size=100)
# The longest of AWS's region names, and an ordinary one.
REGIONS = st.sampled_from(["us-east-1", "ap-southeast-2", "us-gov-west-1", "eusc-de-east-1"])


def names(stack: str, region: str = "us-east-1") -> Names:
    return Names(stack=stack, account_id="123456789012", region=region, partition="aws")


@given(stack=STACKS, region=REGIONS)
def test_every_name_is_legal_and_short_enough(stack: str, region: str) -> None:
    made = names(stack, region)
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", made.bucket)
    assert not made.prefix.startswith("sg-")
    assert re.fullmatch(r"[\w+=,.@-]{1,64}", made.role)
    assert re.fullmatch(r"[\w+=,.@-]{1,64}", f"AWSServiceRoleForAutoScaling_{made.service_role_suffix}")
    assert re.fullmatch(r"[\w-]{1,80}", made.queue)
    assert re.fullmatch(r"[\w.-]{1,64}", made.rule("spot-interruption"))
    assert re.fullmatch(r"[\w/.-]{1,512}", made.log_group)
    assert re.fullmatch(r"alias/[\w/-]{1,250}", made.key_alias)


@given(one=STACKS, other=STACKS)
def test_two_stacks_never_share_a_name(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)


# AWS makes these of a name that exists without a word, or returns the one there (naming.py).
SILENTLY_SHARED = {"Bucket", "Queue", "EventRule"}


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_second_stack_of_the_same_name_fails_before_it_touches_the_first(name: str) -> None:
    declared = {f"{one.kind} {one.name}": one for one in variant(name)}

    def before(resource: str) -> set[str]:
        own = declared[resource].after
        return {*own}.union(*(before(other) for other in own))

    shared = [key for key, one in declared.items() if one.kind in SILENTLY_SHARED]
    assert {declared[key].kind for key in shared} == SILENTLY_SHARED
    for key in shared:
        assert "ServiceLinkedRole gpufleet-dev-auto-scaling" in before(key), key


@pytest.mark.parametrize("stack", ["", "a b", "x/y", "é", "a" * 101, "$(reboot)", "../up"])
def test_a_name_that_is_no_stack_is_refused(stack: str) -> None:
    with pytest.raises(ValueError, match="stack name"):
        slug(stack)


def test_gpufleets_own_tags_win() -> None:
    labels = tags("dev", "llama-2-7b", {"team": "nlp", "gpufleet:stack": "forged", "Project": "other"})
    assert labels == {"team": "nlp", "Project": "gpufleet", "gpufleet:stack": "dev", "gpufleet:model": "llama-2-7b"}


@pytest.mark.parametrize("model", ["my model (v2)", "run,7;b", "x" * 300, "größe/7B", "pkg.mod:make"])
def test_a_models_name_becomes_what_a_tag_can_hold(model: str) -> None:
    label = tags("dev", model, {})["gpufleet:model"]
    assert re.fullmatch(r"[\w .:/=+@-]{1,256}", label)
    assert label == model or len(model) > 256 or "_" in label
