//! The vhost-user virtio-gpu endpoint of one VM.
