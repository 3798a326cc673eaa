//! The vhost-user virtio-gpu endpoint of one VM.
//!
//! It owns the connection to the VMM, the map of guest RAM, the virtio-gpu resources and contexts of the guest, and for each
//! guest process with a session the control socket, the doorbell and the life of one worker. It also serves programs of the host
//! without a VM, and guests whose memory is not shared. It knows nothing of CUDA, and reads no data that passes between a guest
//! and a worker, except what it carries for guests without shared memory ([`stream`]).
//!
//! It must never die and never stop draining its queue, because a stock VMM cannot reconnect and a guest process that waits for
//! a full queue cannot even be killed. So nothing here waits for a worker or for `sluiced`, input of a guest or a worker is a
//! value and never a panic, and a panic that happens all the same ends one session.
//!
//! A command travels [`frontend`] (vhost-user) → [`endpoint`] (the queues) → [`chain`] (one private copy) → [`device`] (its
//! meaning, with [`resources`], [`contexts`] or [`controls`], and [`sessions`]) and its answer back, at once or through
//! [`waiters`] if the command has to wait. [`workers`] speaks to workers, [`link`] to `sluiced`; [`poller`] is the one place
//! that waits. [`serve`] accepts front-ends, [`relay`] takes over a connection that another process has made, and [`users`] has
//! the shares of the host's users. [`memory`] records the owner of each guest page, [`page`] the device's words in a control
//! resource, and [`vring`] drives a virtqueue. [`stream`] is the front-end of a guest that shares no memory. [`program`] begins it all.
//!
//! Folders from top to bottom: stream, device, link.

#![warn(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

pub mod chain;
pub mod contexts;
pub mod controls;
pub mod device;
pub mod endpoint;
pub mod frontend;
pub mod link;
pub mod memory;
pub mod page;
pub mod poller;
pub mod program;
pub mod relay;
pub mod resources;
pub mod serve;
pub mod sessions;
pub mod stream;
pub mod users;
pub mod vring;
pub mod waiters;
pub mod workers;
