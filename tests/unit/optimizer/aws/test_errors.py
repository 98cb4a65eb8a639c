from __future__ import annotations

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError

from optimizer.aws import errors


def _client_error(code: str, message: str = "as AWS says it") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "DescribeInstanceTypes")


PREDICATES = (
    errors.has_no_credentials,
    errors.has_bad_credentials,
    errors.is_not_permitted,
    errors.is_region_disabled,
    errors.is_not_found,
    errors.is_throttled,
    errors.is_unreachable,
    errors.is_unreadable,
    errors.is_server_fault,
)


@pytest.mark.parametrize(
    ("error", "predicate", "says"),
    [
        (NoCredentialsError(), errors.has_no_credentials, "run `aws configure`"),
        (ProfileNotFound(profile="training"), errors.has_no_credentials, "training"),
        (_client_error("ExpiredToken"), errors.has_bad_credentials, "refused the credentials (ExpiredToken)"),
        (_client_error("AuthFailure"), errors.has_bad_credentials, "the region is not enabled"),
        (_client_error("UnauthorizedOperation"), errors.is_not_permitted, "as AWS says it"),
        (_client_error("AccessDeniedException"), errors.is_not_permitted, "may not do this"),
        (_client_error("403"), errors.is_not_permitted, "may not do this"),
        (_client_error("404"), errors.is_not_found, "as AWS says it"),
        (_client_error("NoSuchResourceException"), errors.is_not_found, "as AWS says it"),
        (_client_error("OptInRequired"), errors.is_region_disabled, "`aws account enable-region`"),
        (_client_error("RequestLimitExceeded"), errors.is_throttled, "try again later"),
        (_client_error("ThrottlingException"), errors.is_throttled, "throttled"),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:9"), errors.is_unreachable, "127.0.0.1:9"),
        (ConnectTimeoutError(endpoint_url="http://127.0.0.1:9"), errors.is_unreachable, "no answer"),
        (ReadTimeoutError(endpoint_url="http://127.0.0.1:9"), errors.is_unreachable, "no answer"),
        (ResponseParserError("invalid XML received: b'<!doctype html>'"), errors.is_unreadable, "is there a proxy"),
        (_client_error("InternalError"), errors.is_server_fault, "AWS failed (InternalError)"),
    ],
)
def test_each_error_is_of_one_class(error: Exception, predicate: object, says: str) -> None:
    assert [check for check in PREDICATES if check(error)] == [predicate]
    assert says in errors.reason(error)
    assert errors.is_aws_error(error)


def test_an_unclassified_code_keeps_its_code_and_message() -> None:
    error = _client_error("InvalidParameterValue", "The instance type 'x' is invalid")
    assert not any(check(error) for check in PREDICATES)
    assert errors.reason(error) == "InvalidParameterValue: The instance type 'x' is invalid"


def test_a_bare_http_error_of_the_server_is_one_line() -> None:
    page = "<!doctype html>\n<title>500</title>\n" + "<p>sorry</p>\n" * 100
    error = ClientError(
        {"Error": {"Code": "500", "Message": page}, "ResponseMetadata": {"HTTPStatusCode": 502}},  # type: ignore[typeddict-item]
        "GetProducts",
    )
    assert errors.is_server_fault(error)
    assert errors.reason(error) == "AWS failed (500); try again later"
    odd = ClientError({"Error": {"Code": "Teapot", "Message": page}}, "GetProducts")
    assert "\n" not in errors.reason(odd) and len(errors.reason(odd)) < 250
