"""Credentials of the training's own role, which the agent takes and renews: the training's user has no others.

AWS's SDKs read them by a credential_process of a configuration file:
https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html
"""

from __future__ import annotations

import json
import os
import threading
import time

from bootstrap.agent.commands import aws_cli, log
from bootstrap.agent.group import GroupClient
from bootstrap.agent.settings import Settings

# A role taken with a role's credentials lasts an hour at most:
# https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
# botocore renews 15 minutes before the end, so that a file must be younger than 45 minutes.
LIFE_S = 3600
RENEW_S = 1200.0
RETRY_S = 10.0


class TrainingCredentials:
    """A file that the training's user may read, renewed until the agent ends; nothing where training has no role."""

    def __init__(self, settings: Settings, group: GroupClient) -> None:
        self._settings, self._group = settings, group
        self._folder = settings.credentials_dir
        self._started = False

    def take(self) -> bool:
        """Take the role and keep it; False where AWS does not give it."""
        if self._settings.train_role_arn and not self._started:
            if not self._renew():
                return False
            self._started = True
            threading.Thread(target=self._keep, name="credentials", daemon=True).start()
        return True

    def environment(self) -> dict[str, str]:
        """Variables of a process that has the role's credentials alone."""
        if not self._settings.train_role_arn:
            return {}
        return {
            "AWS_CONFIG_FILE": str(self._folder / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            # Without it the SDK for Go 1.x (s5cmd, rclone) reads no configuration file (the page above).
            "AWS_SDK_LOAD_CONFIG": "1",
            # The firewall refuses it (steps/limit-metadata.sh).
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _keep(self) -> None:
        wait_s = RENEW_S
        while True:
            time.sleep(wait_s)
            wait_s = RENEW_S if self._renew() else RETRY_S

    def _renew(self) -> bool:
        settings = self._settings
        answer = aws_cli(
            settings.region, "sts", "assume-role", "--role-arn", settings.train_role_arn, "--role-session-name",
            self._group.instance_id() or "node", "--duration-seconds", str(LIFE_S),
            "--query", "Credentials.[AccessKeyId,SecretAccessKey,SessionToken,Expiration]",
        )  # fmt: skip
        words = (answer or "").split()
        if len(words) != 4:
            log(f"the training's role {settings.train_role_arn} could not be taken; trying again")
            return False
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
        try:
            self._write(json.dumps({"Version": 1, **dict(zip(names, words, strict=True))}))
        except OSError as error:  # memory is full; the thread that renews must not end
            log(f"the training's credentials could not be written: {error}; trying again")
            return False
        return True

    def _write(self, credentials: str) -> None:
        group = user.pw_gid if (user := self._settings.user) else -1
        # Others than the training's user have no business here.
        self._folder.mkdir(mode=0o750, exist_ok=True)
        os.chown(self._folder, -1, group)
        file = self._folder / "credentials.json"
        # The region, as some SDKs ask the metadata service for it where AWS_REGION is not set:
        # https://docs.aws.amazon.com/sdkref/latest/guide/feature-region.html
        config = f"[default]\nregion = {self._settings.region}\ncredential_process = /bin/cat {file}\n"
        for path, text in ((file, credentials), (self._folder / "config", config)):
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            new.touch(mode=0o640)
            os.chown(new, -1, group)
            new.write_text(text, encoding="utf-8")
            new.replace(path)
