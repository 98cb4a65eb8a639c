# shellcheck shell=bash
case "$*" in
  *" s3api head-object "*)
    echo "An error occurred (403) when calling the HeadObject operation: Forbidden" >&2
    exit 254
    ;;
esac
