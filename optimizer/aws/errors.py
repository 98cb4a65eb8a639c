"""Classes of AWS errors: every error code that gpufleet knows is classified here, and nowhere else.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/CommonErrors.html
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

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

# Too many calls, even after botocore's `standard` retries: the same call will work later.
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
# Wrong, expired, or of an account without the region.
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
# The policy lacks the action. "403" and "404" are S3's answers without a body (HeadBucket).
NOT_PERMITTED = frozenset({"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "NotAuthorized"})
REGION_DISABLED = frozenset({"OptInRequired"})
# AWS has no one code for a missing resource. NoSuchResourceException is Service Quotas' answer for a quota at its
# default value.
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

# The bucket exists, the object does not.
NO_OBJECT = frozenset({"NoSuchKey"})
# A conditional write lost to another writer:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
WRITTEN_BY_ANOTHER = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})

MESSAGE_LENGTH = 200  # characters of AWS's own message that are printed


class UnusableAnswerError(ValueError):
    """An answer of AWS that does not fit the question."""


def code(error: BaseException) -> str:
    """Return the AWS error code ("UnauthorizedOperation"), or the exception's name where AWS never answered."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__


def _has_code(codes: frozenset[str]) -> Callable[[BaseException], bool]:
    return lambda error: code(error) in codes


is_throttled = _has_code(THROTTLING)
has_bad_credentials = _has_code(BAD_CREDENTIALS)
is_not_permitted = _has_code(NOT_PERMITTED)
is_region_disabled = _has_code(REGION_DISABLED)
is_not_found = _has_code(NOT_FOUND)
is_no_object = _has_code(NO_OBJECT)
is_written_by_another = _has_code(WRITTEN_BY_ANOTHER)


def has_no_credentials(error: BaseException) -> bool:
    """Return whether this machine has no credentials; no request was sent."""
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
    """Return whether this machine's AWS configuration cannot be used; no request was sent."""
    return isinstance(error, ConfigNotFound | ConfigParseError | InvalidEndpointConfigurationError | InvalidRegionError)


def is_unreachable(error: BaseException) -> bool:
    """Return whether no answer came: no network, no such endpoint, or a time-out."""
    return isinstance(error, ConnectionError | HTTPClientError)


def is_server_fault(error: BaseException) -> bool:
    """Return whether AWS itself failed, with a code of its own or a bare HTTP 5xx."""
    if not isinstance(error, ClientError):
        return False
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return code(error) in SERVER_FAULT or (status >= 500 and not is_throttled(error))


def is_unreadable(error: BaseException) -> bool:
    """Return whether a proxy or a portal answered in place of AWS. Not a BotoCoreError."""
    return isinstance(error, ResponseParserError)


def is_aws_error(error: BaseException) -> bool:
    """Return whether botocore raised the error, so that ``reason`` can explain it."""
    return isinstance(error, ClientError | BotoCoreError | ResponseParserError)


# The first predicate that holds decides. {code}, {message}: of AWS's answer; {error}: the exception.
_REASONS: tuple[tuple[Callable[[BaseException], bool], str], ...] = (
    (has_no_credentials, "no AWS credentials were found ({error}); run `aws configure` or set AWS_PROFILE"),
    (
        is_misconfigured,
        "this machine's AWS configuration cannot be used ({error}); mend ~/.aws/config, or AWS_ENDPOINT_URL",
    ),
    (has_bad_credentials, "AWS refused the credentials ({code}): expired, wrong, or the region is not enabled"),
    (is_not_permitted, "the credentials may not do this ({code}): {message}"),
    (is_region_disabled, "the account has not enabled the region"),
    (is_throttled, "AWS throttled the calls ({code}), even after waiting; try again later"),
    (is_unreachable, "no answer from AWS ({error})"),
    (is_unreadable, "what answered is not AWS; is there a proxy in between? ({message})"),
    (is_server_fault, "AWS failed ({code}); try again later"),
)


def reason(error: BaseException) -> str:
    """Return cause and remedy of an error in one line."""
    text = next((text for applies, text in _REASONS if applies(error)), "{code}: {message}")
    return text.format(error=error, code=code(error), message=_message(error))


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ClientError):
        text = str(error.response.get("Error", {}).get("Message", ""))
    # A proxy may answer with a page of HTML.
    return textwrap.shorten(text, MESSAGE_LENGTH)
