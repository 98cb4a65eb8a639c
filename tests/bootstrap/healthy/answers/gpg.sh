# shellcheck shell=bash
case "$*" in
  *--import*) exit 0 ;;
  *--fingerprint*) # the key that belongs to the file imported before
    fingerprint=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC
    if grep --quiet 'libnvidia-container/gpgkey' "$FAKE_CALLS"; then
      fingerprint=C95B321B61E88C1809C4F759DDCAE044F796ECB0
    fi
    printf '%s\n' "pub:-:4096:1:0:0::-:::scSC::::::23::0:" "fpr:::::::::$fingerprint:" "uid:-::::0::0::key::::::::::0:" \
      "sub:-:4096:1:0:0:::::e::::::23:" "fpr:::::::::0000000000000000000000000000000000000000:"
    exit 0
    ;;
  *--export*)
    while (($# > 0)); do
      if [[ $1 == --output ]]; then echo key >"$2"; fi
      shift
    done
    exit 0
    ;;
esac
exit 0
