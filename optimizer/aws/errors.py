"""What an AWS error means for gpufleet: every code classified here, and nowhere else.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/CommonErrors.html
"""

from __future__ import annotations

import textwrap

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    ConnectionError,
    HTTPClientError,
    InvalidEndpointConfigurationError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

# botocore's `standard` retries have already waited and tried again by the time one of these is raised.
THROTTLING = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "RequestThrottled",
        "BandwidthLimitExceeded",
    }
)
BAD_CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
# "403" is S3's answer without a body (HeadBucket).
NOT_PERMITTED = frozenset({"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "NotAuthorized"})
REGION_DISABLED = frozenset({"OptInRequired"})
# What was asked for does not exist; AWS has no one code for it. "404" is S3's answer without a body (HeadBucket), and
# NoSuchResourceException that of Service Quotas for a quota that has its default value.
NOT_FOUND = frozenset(
    {
        "404",
        "InvalidAMIID.Malformed",
        "InvalidAMIID.NotFound",
        "InvalidAMIID.Unavailable",
        "InvalidCapacityReservationId.Malformed",
        "InvalidCapacityReservationId.NotFound",
        "InvalidSubnetID.NotFound",
        "InvalidVpcID.NotFound",
        "NoSuchBucket",
        "NoSuchEntity",
        "NoSuchResourceException",
        "NotFoundException",
        "ResourceNotFoundException",
    }
)
SERVER_FAULT = frozenset(
    {"InternalError", "InternalFailure", "InternalErrorException", "ServiceUnavailable", "Unavailable"}
)

# An object that is not there, in a bucket that is.
NO_OBJECT = frozenset({"NoSuchKey"})
# A conditional write found that somebody else had written:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
WRITTEN_BY_ANOTHER = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})

MESSAGE_LENGTH = 200  # characters of AWS's own message that are passed on


class UnusableAnswerError(ValueError):
    """AWS answered, and not with what was asked for; the message says what is missing or odd."""


def code(error: BaseException) -> str:
    """The AWS error code ("UnauthorizedOperation"), or the exception's own name where AWS never answered."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__


def is_throttled(error: BaseException) -> bool:
    """Whether the account made too many calls: the same call will work later."""
    return code(error) in THROTTLING


def has_no_credentials(error: BaseException) -> bool:
    """Whether no credentials were found on this machine; no request was sent."""
    return isinstance(
        error,
        NoCredentialsError
        | PartialCredentialsError
        | ProfileNotFound
        | TokenRetrievalError
        | UnauthorizedSSOTokenError
        | NoRegionError,
    )


def is_misconfigured(error: BaseException) -> bool:
    """Whether this machine's AWS configuration cannot be used; no request was sent."""
    return isinstance(error, ConfigNotFound | ConfigParseError | InvalidEndpointConfigurationError | InvalidRegionError)


def has_bad_credentials(error: BaseException) -> bool:
    """Whether AWS refused the credentials: wrong, expired, or of an account that has not enabled the region."""
    return code(error) in BAD_CREDENTIALS


def is_not_permitted(error: BaseException) -> bool:
    """Whether the credentials are good and their policy lacks the action."""
    return code(error) in NOT_PERMITTED


def is_region_disabled(error: BaseException) -> bool:
    """Whether the account has not enabled the region."""
    return code(error) in REGION_DISABLED


def is_not_found(error: BaseException) -> bool:
    """Whether AWS answered that there is no such thing."""
    return code(error) in NOT_FOUND


def is_unreachable(error: BaseException) -> bool:
    """Whether no answer came: no network, no such endpoint, or a time-out."""
    return isinstance(error, ConnectionError | HTTPClientError)


def is_server_fault(error: BaseException) -> bool:
    """Whether AWS itself failed, with a code of its own or a bare HTTP 5xx."""
    if not isinstance(error, ClientError):
        return False
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return code(error) in SERVER_FAULT or (status >= 500 and not is_throttled(error))


def is_no_object(error: BaseException) -> bool:
    """Whether the bucket has no such object."""
    return code(error) in NO_OBJECT


def is_written_by_another(error: BaseException) -> bool:
    """Whether a conditional write lost to somebody else's."""
    return code(error) in WRITTEN_BY_ANOTHER


def is_unreadable(error: BaseException) -> bool:
    """Whether something answered in no language of AWS: a proxy's or a portal's page. Not a BotoCoreError."""
    return isinstance(error, ResponseParserError)


def is_aws_error(error: BaseException) -> bool:
    """Whether botocore raised it, so that ``reason`` can say what it means."""
    return isinstance(error, ClientError | BotoCoreError | ResponseParserError)


def reason(error: BaseException) -> str:
    """What happened and what to do, in a line for a person."""
    if has_no_credentials(error):
        return f"no AWS credentials were found ({error}); run `aws configure` or set AWS_PROFILE"
    if is_misconfigured(error):
        return f"this machine's AWS configuration cannot be used ({error}); mend ~/.aws/config, or AWS_ENDPOINT_URL"
    if has_bad_credentials(error):
        return f"AWS refused the credentials ({code(error)}): expired, wrong, or the region is not enabled"
    if is_not_permitted(error):
        return f"the credentials may not do this ({code(error)}): {_message(error)}"
    if is_region_disabled(error):
        return "the account has not enabled the region"
    if is_throttled(error):
        return f"AWS throttled the calls ({code(error)}), even after waiting; try again later"
    if is_unreachable(error):
        return f"no answer from AWS ({error})"
    if is_unreadable(error):
        return f"what answered is not AWS; is there a proxy in between? ({_message(error)})"
    if is_server_fault(error):
        return f"AWS failed ({code(error)}); try again later"
    return f"{code(error)}: {_message(error)}"


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ClientError):
        text = str(error.response.get("Error", {}).get("Message", ""))
    # A proxy may answer with a page of HTML.
    return textwrap.shorten(text, MESSAGE_LENGTH)
