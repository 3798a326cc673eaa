# Runs the bundle in a root that has the host's folders of libraries and nothing else: no folder of programs, no network, nothing
# to write to but the folder for results and memory. Programs below /usr/lib are there, but no PATH leads to them. Arguments: an
# empty folder for the root, the bundle, the folder for results, and the arguments of the bundle's program. The caller has given
# this shell mount, network and process namespaces of its own.
set -eu
root=$1 bundle=$2 out=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$root"
cd "$root"
mkdir -p usr bundle out proc dev tmp

read_only() {
    mkdir -p "$2"
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
}

for libraries in /lib /lib64 /usr/lib /usr/lib64; do
    if [ -L "$libraries" ]; then
        ln -s "$(readlink "$libraries")" ".$libraries"
    elif [ -d "$libraries" ]; then
        read_only "$libraries" ".$libraries"
    fi
done
read_only "$bundle" bundle
mount --bind "$out" out
mount -t proc proc proc
mount -t tmpfs -o mode=1777 none tmp
for device in null zero random urandom; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir -p dev/shm
mount -t tmpfs -o mode=1777 none dev/shm
mkdir dev/shm/gpu
mount -o remount,ro "$root"

status=0
chroot . /bundle/sluice-hardware "$@" || status=$?

# The namespace shows every process, also one that left its group. This shell is its first.
for process in proc/[0-9]*; do
    [ "$process" = proc/1 ] || echo "left: process $(cat "$process/comm" 2>/dev/null || echo "$process")"
done
# HOME is /tmp, so caches of libraries would be files whose names begin with a dot. A pattern without a file stays as it is.
for file in tmp/* tmp/.[!.]* dev/shm/* dev/shm/.[!.]*; do
    if [ "$file" != dev/shm/gpu ] && [ -e "$file" ]; then
        echo "left: $file"
    fi
done
exit $status
