# shellcheck shell=bash
case "$*" in
  *"--request PUT"*"/latest/api/token")
    echo -n IMDS-TOKEN-SECRET
    exit 0
    ;;
  *"/latest/meta-data/instance-id")
    [[ $(cat) == "X-aws-ec2-metadata-token: IMDS-TOKEN-SECRET" ]] || exit 22
    echo -n i-0123456789abcdef0
    exit 0
    ;;
  *"/latest/meta-data/autoscaling/target-lifecycle-state")
    cat >/dev/null
    echo -n InService
    exit 0
    ;;
  *--head*)
    printf 'HTTP/1.1 403 Forbidden\r\nDate: %s\r\n\r\n' "$(date --utc '+%a, %d %b %Y %H:%M:%S GMT')"
    exit 0
    ;;
esac
# A download: the file after --output.
url=${*: -1} file=""
while (($# > 0)); do
  if [[ $1 == --output ]]; then file=$2; fi
  shift
done
case $url in
  *aws-efa-installer-*.tar.gz) tar --create --gzip --file "$file" --directory "$FAKE_HEALTHY/efa" aws-efa-installer ;;
  *) echo "content of $url" >"$file" ;;
esac
exit 0
