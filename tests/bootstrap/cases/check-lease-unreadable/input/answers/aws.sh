# shellcheck shell=bash
case "$*" in
  *" s3api list-objects-v2 "*)
    echo "An error occurred (403) when calling the ListObjectsV2 operation: Forbidden" >&2
    exit 254
    ;;
esac
