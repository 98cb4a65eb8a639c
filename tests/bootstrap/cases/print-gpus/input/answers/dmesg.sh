# shellcheck shell=bash
echo "[ 1.0] NVRM: Xid (PCI:0000:59:00): 94, pid='<unknown>', name=<unknown>, Contained error"
echo "[ 2.0] NVRM: Xid (PCI:0000:59:00): 94, pid=7"
echo "[ 3.0] NVRM: Xid (PCI:0000:60:00): 31, pid=7"
echo "[ 4.0] EXT4-fs (nvme0n1p1): mounted"
exit 0
