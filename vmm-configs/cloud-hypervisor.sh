#!/bin/sh
# A Sluice GPU for a VM of stock Cloud Hypervisor, 53 or newer. Add your own options: ./cloud-hypervisor.sh --kernel … --disk …
#
#     sluice create web-1 --guest-memory 4GiB      # on the host; prints the socket, which must exist before the VMM starts
#
# The device maps guest memory, so the memory must be shared. Cloud Hypervisor does not seal it, so sluiced accepts it only with
# `trust-vmm-memory = true` in its configuration. 16 is virtio's number for a GPU, which has a command queue and a cursor queue.
# Version 52 calls the device_type virtio_id.
exec cloud-hypervisor \
    --memory size=4294967296,shared=on \
    --generic-vhost-user 'socket=/run/sluice/vm-1000.sock,device_type=16,queue_sizes=[1024,16]' \
    "$@"
