"""A stack whose state is lost goes on with the same bucket: from a copy of the state, or by adopting it.

The commands are those of docs/infrastructure.md, "A lost state".
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.deployment import Tools, deployment

FIXTURE = Path(__file__).parent / "fixtures/lost"
BUCKET = "gpufleet-dev-123456789012-us-east-1"
ADOPTED = {
    "resources": [
        {"type": "gpufleet:infra:Storage", "name": "storage", "component": True},
        {"type": "aws:s3/bucket:Bucket", "name": "gpufleet-dev-checkpoints", "id": BUCKET, "parent": "storage"},
    ]
}


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_checkpoints_outlive_the_state(tools: Tools, tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "project")
    with deployment(tools, tmp_path, "dev", attached=False) as deployed:
        stack, s3 = deployed.stack, deployed.aws("s3")
        stack.up()
        s3.put_object(Bucket=BUCKET, Key="checkpoints/step-1", Body=b"saved")
        stack.run("stack export --stack dev --file copy.json")

        stack.lose_state()
        stack.run("stack init dev")
        stack.run("stack import --stack dev --file copy.json")
        assert stack.settled().changed() == {}

        stack.lose_state()
        stack.run("stack init dev")
        (stack.project / "adopt.json").write_text(json.dumps(ADOPTED), encoding="utf-8")
        stack.run("import --stack dev --file adopt.json --generate-code=false --yes --skip-preview")
        touched = stack.up().changed()
        assert not [name for name in touched.get("create", []) if "bucket:Bucket::" in name], "made anew"
        assert not {"delete", "replace", "create-replacement", "delete-replaced"} & set(touched)
        assert stack.settled().changed() == {}
        assert s3.get_object(Bucket=BUCKET, Key="checkpoints/step-1")["Body"].read() == b"saved"
