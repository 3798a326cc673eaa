//! Render nodes of the stock `virtio_gpu` driver: the search for a Sluice device, and the ioctls on it.
//!
//! Each ioctl is a safe function on a borrowed descriptor and returns the kernel's answer; the caller owns the descriptor and
//! handles errors.

mod ioctl;
mod kinds;

pub use ioctl::{MadeResource, Node};
pub use kinds::{Abilities, DeviceKind, Mode};
