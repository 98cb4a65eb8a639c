"""Classes of AWS errors: every error code that gpufleet knows.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/CommonErrors.html
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from botocore import exceptions
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from optimizer.contract.errors import GpufleetError

# Next step where AWS does not say who asks.
CHECK_CREDENTIALS = "aws sts get-caller-identity shows whether credentials work"
MESSAGE_LENGTH = 200  # printed characters of AWS's message


class UnusableAnswerError(ValueError):
    """An answer of AWS that does not fit the question."""


def code(error: BaseException) -> str:
    """Return AWS's code ("UnauthorizedOperation"), or the exception's name where AWS did not answer."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__


def _has_code(codes: str) -> Callable[[BaseException], bool]:
    """Predicate of the errors whose code is among ``codes``, separated by spaces."""
    return lambda error: code(error) in codes.split()


def _is_a(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, types)


def _any_of(*predicates: Callable[[BaseException], bool]) -> Callable[[BaseException], bool]:
    return lambda error: any(applies(error) for applies in predicates)


# Too many calls, even after botocore's `standard` retries.
is_throttled = _has_code(
    "RequestLimitExceeded Throttling ThrottlingException ThrottledException TooManyRequestsException "
    "RequestThrottled BandwidthLimitExceeded"
)
has_bad_credentials = _has_code(
    "AuthFailure ExpiredToken ExpiredTokenException InvalidClientTokenId RequestExpired SignatureDoesNotMatch "
    "UnrecognizedClientException"
)
# The policy lacks the action. "403" and "404" are S3's answers without a body (HeadBucket).
is_not_permitted = _has_code("403 AccessDenied AccessDeniedException UnauthorizedOperation NotAuthorized")
is_region_disabled = _has_code("OptInRequired")
# NoSuchResourceException is Service Quotas' answer for a quota at its default value.
is_not_found = _has_code(
    "404 InvalidAMIID.Malformed InvalidAMIID.NotFound InvalidAMIID.Unavailable InvalidCapacityReservationId.Malformed "
    "InvalidCapacityReservationId.NotFound ParameterNotFound NoSuchBucket NoSuchResourceException NotFoundException "
    "RepositoryNotFoundException ResourceNotFoundException"
)
# S3's answers for objects under a KMS key that is disabled, about to be deleted, or gone:
# https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/USER_ExportSnapshot.FailureMsg.html
is_key_unusable = _has_code("KMS.DisabledException KMS.KMSInvalidStateException KMS.NotFoundException")
# The bucket exists, the object does not.
is_no_object = _has_code("NoSuchKey")
# A conditional write lost: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
is_written_by_another = _has_code("PreconditionFailed ConditionalRequestConflict")
_has_fault_code = _has_code("InternalError InternalFailure InternalErrorException ServiceUnavailable Unavailable")
# No request was sent: this machine has no credentials, or its AWS configuration cannot be used.
has_no_credentials = _is_a(
    *(exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound),
    *(exceptions.TokenRetrievalError, exceptions.UnauthorizedSSOTokenError, exceptions.NoRegionError),
    exceptions.CredentialRetrievalError,
)
is_misconfigured = _is_a(
    *(exceptions.ConfigNotFound, exceptions.ConfigParseError),
    *(exceptions.InvalidEndpointConfigurationError, exceptions.InvalidRegionError),
)
# No network, no such endpoint, or a time-out.
is_unreachable = _is_a(exceptions.ConnectionError, exceptions.HTTPClientError)
# A proxy or a portal answered in place of AWS. Not a BotoCoreError.
is_unreadable = _is_a(ResponseParserError)
# Errors after which no other call to the service would work.
stops_all_calls = _any_of(
    has_no_credentials, is_misconfigured, has_bad_credentials, is_region_disabled, is_unreachable, is_unreadable
)
# Errors that ``reason`` can explain: AWS's refusals, and failures to ask it.
AWS_ERRORS = (ClientError, BotoCoreError, ResponseParserError)
is_aws_error = _is_a(*AWS_ERRORS)


def is_server_fault(error: BaseException) -> bool:
    """Return whether AWS itself failed, with a code or a bare HTTP 5xx."""
    if not isinstance(error, ClientError):
        return False
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return _has_fault_code(error) or (status >= 500 and not is_throttled(error))


_ENABLE = "the region is not enabled (`aws account enable-region` does it)"
# The first predicate that holds decides. {code}, {message}: of AWS's answer; {error}: the exception.
_REASONS: tuple[tuple[Callable[[BaseException], bool], str], ...] = (
    (has_no_credentials, "no AWS credentials were found ({error}); run `aws configure` or set AWS_PROFILE"),
    (
        is_misconfigured,
        "this machine's AWS configuration cannot be used ({error}); mend ~/.aws/config, or AWS_ENDPOINT_URL",
    ),
    (has_bad_credentials, "AWS refused the credentials ({code}): expired, wrong, or " + _ENABLE),
    (is_not_permitted, "the credentials may not do this ({code}): {message}"),
    (is_region_disabled, _ENABLE),
    (is_throttled, "AWS throttled the calls ({code}), even after waiting; try again later"),
    (is_unreachable, "no answer from AWS ({error})"),
    # An answer that lacks its fields, like a portal's page of HTML, is a KeyError of botocore's parser.
    (_any_of(is_unreadable, _is_a(KeyError)), "what answered is not AWS; is there a proxy in between? ({message})"),
    (is_server_fault, "AWS failed ({code}); try again later"),
)


def reason(error: BaseException) -> str:
    """Return an error's cause and remedy in one line; of an error of ours its own words."""
    if isinstance(error, GpufleetError):
        return error.got
    if isinstance(error, UnusableAnswerError):
        return str(error)
    text = next((text for applies, text in _REASONS if applies(error)), "{code}: {message}")
    return text.format(error=error, code=code(error), message=_message(error))


def _message(error: BaseException) -> str:
    text = error.response.get("Error", {}).get("Message", "") if isinstance(error, ClientError) else error
    # A proxy may answer with a page of HTML.
    return textwrap.shorten(str(text), MESSAGE_LENGTH)


@contextmanager
def explained(got: str, *, why: str = "", next_step: str = "") -> Iterator[None]:
    """Raise an AWS error of the block as a GpufleetError: ``got``, and AWS's reason."""
    try:
        yield
    except (*AWS_ERRORS, KeyError) as error:
        raise GpufleetError(f"{got}: {reason(error)}", why=why, next_step=next_step) from error
