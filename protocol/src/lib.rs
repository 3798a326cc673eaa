//! The contract between guest and host: call table, records, ring, session page, virtio-gpu wire, control messages, limits.
