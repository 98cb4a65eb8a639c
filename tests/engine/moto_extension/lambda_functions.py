"""Lambda functions whose logging, dead letter queue, tracing, storage and key are what was given, at first and later.

moto 5.2 answers without LoggingConfig and DeadLetterConfig and drops most changes of a configuration:
https://docs.aws.amazon.com/lambda/latest/api/API_GetFunctionConfiguration.html
"""

from __future__ import annotations

from typing import Any

from moto.awslambda.models import LambdaFunction

_init = LambdaFunction.__init__
_get_configuration = LambdaFunction.get_configuration
_update_configuration = LambdaFunction.update_configuration


def install() -> None:
    """Put the methods into moto's functions."""
    LambdaFunction.__init__ = init  # type: ignore[method-assign]
    LambdaFunction.get_configuration = get_configuration  # type: ignore[method-assign]
    LambdaFunction.update_configuration = update_configuration  # type: ignore[method-assign]


def init(self: Any, account_id: str, spec: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Make a function; both parts have the defaults of CreateFunction."""
    _init(self, account_id, spec, *args, **kwargs)
    # https://docs.aws.amazon.com/lambda/latest/api/API_LoggingConfig.html
    self.logging_config = {
        "LogFormat": "Text",
        "LogGroup": f"/aws/lambda/{self.function_name}",
        **spec.get("LoggingConfig", {}),
    }
    self.dead_letter_config = spec.get("DeadLetterConfig") or {}


def get_configuration(self: Any, on_create: bool = False) -> dict[str, Any]:
    """The function's configuration."""
    parts = {"LoggingConfig": self.logging_config}
    if self.dead_letter_config.get("TargetArn"):
        parts["DeadLetterConfig"] = self.dead_letter_config
    return _get_configuration(self, on_create) | parts


def update_configuration(self: Any, config_updates: dict[str, Any]) -> dict[str, Any]:
    """UpdateFunctionConfiguration: what it names changes."""
    self.logging_config |= config_updates.get("LoggingConfig", {})
    self.dead_letter_config = config_updates.get("DeadLetterConfig", self.dead_letter_config)
    self.tracing_config = config_updates.get("TracingConfig", self.tracing_config)
    self.kms_key_arn = config_updates.get("KMSKeyArn", self.kms_key_arn)
    if "EphemeralStorage" in config_updates:
        self.ephemeral_storage = config_updates["EphemeralStorage"]["Size"]
    _update_configuration(self, config_updates)
    return get_configuration(self)
